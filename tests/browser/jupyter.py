"""A JupyterLab of this interpreter, alone: own folders, port and token, no news."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.browser.processes import END_TIMEOUT_S, end_all, start
from tests.guards import GUARD_S

# Extensions of the server that the tests have no use for; each costs its start time.
UNUSED = (
    "jupyter_server_terminals",
    "jupyterlab_jupytext",
    "notebook_shim",
)
# Settings of JupyterLab that a person might have had no say in.
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


@dataclass(frozen=True)
class Jupyter:
    """A running server: its address, ending in a slash, its token, its folder."""

    url: str
    token: str
    root: Path

    def page_of(self, notebook: str) -> str:
        """The address at which JupyterLab opens a notebook, and nothing else."""
        return f"{self.url}lab/tree/{notebook}?reset&token={self.token}"


@contextmanager
def jupyter(root: Path, home: Path, mark: str) -> Iterator[Jupyter]:
    """JupyterLab over the files of `root`; ends with all its kernels.

    Args:
        root: what it shows.
        home: an empty folder for its configuration, data, connection files and log.
        mark: that its processes carry.

    Raises:
        RuntimeError: it ended, or did not answer in time; with its log.
    """
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "run",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    overrides = (
        folders["JUPYTER_CONFIG_DIR"] / "labconfig" / "default_setting_overrides.json"
    )
    overrides.parent.mkdir()
    overrides.write_text(json.dumps(OVERRIDES))
    token = os.urandom(16).hex()
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"),
        *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"),
        f"--ServerApp.jpserver_extensions={dict.fromkeys(UNUSED, False)}",
        "--expose-app-in-browser",
    ]
    environ = {**os.environ, **{name: str(path) for name, path in folders.items()}}
    environ["PYTHONPATH"] = ""  # the kernel sees what is installed
    log = home / "jupyter.log"
    server = start(command, mark, environ, log)
    try:
        written = folders["JUPYTER_RUNTIME_DIR"] / f"jpserver-{server.pid}.json"
        deadline = time.monotonic() + GUARD_S
        while not written.exists() or not written.read_text().strip():
            if server.poll() is not None or time.monotonic() > deadline:
                said = log.read_text("utf-8", "replace")[-3000:]
                raise RuntimeError(f"JupyterLab did not start; it said:\n{said}")
            time.sleep(0.05)
        yield Jupyter(str(json.loads(written.read_text())["url"]), token, root)
    finally:
        server.terminate()  # it then ends its kernels
        with suppress(subprocess.TimeoutExpired):
            server.wait(END_TIMEOUT_S)
        end_all(mark)
        server.wait(END_TIMEOUT_S)

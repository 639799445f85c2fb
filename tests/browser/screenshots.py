"""The README's pictures of the live timeline: `python -m tests.browser.screenshots`.

Writes course/images/widget-light.png and widget-dark.png: the knobs of lab 06 in
JupyterLab, after a learner has turned some of them and kept two settings.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import uuid
from pathlib import Path

from PIL import Image

from tests.browser.jupyter import Jupyter, jupyter
from tests.browser.live import Live, run_live
from tests.browser.notebook import Notebook, chromium
from tests.browser.processes import find_chromium

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "course" / "images"
LAB = "06_bucketing.ipynb"
WIDTH = 1100
MAX_BYTES = 200 * 1024
COLORS = 128  # of a picture: it has few, and text stays sharp


def optimise(path: Path) -> None:
    """Write a picture again with few colours.

    Raises:
        ValueError: it is still larger than a README should load.
    """
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; expected at most {MAX_BYTES}")


def use(live: Live) -> None:
    """Turn some knobs and keep two settings, as lab 06 asks for."""
    names = [button.get_attribute("data-keep") or "" for button in live.keeps()]
    live.drag("bucket_mib", to=0.3)
    live.drag("latency_us", to=0.75)
    if names:
        live.keep(names[0])
    live.drag("bucket_mib", to=0.75)
    live.drag("gbyte_per_s", to=0.4)
    if len(names) > 1:
        live.keep(names[1])


def take(server: Jupyter, executable: str, mark: str) -> None:
    """Open the lab, use it, and take it in both themes."""
    IMAGES.mkdir(exist_ok=True)
    with chromium(executable, mark) as browser:
        notebook = Notebook(browser, server, LAB, width=WIDTH, scale=1.5)
        notebook.command("application:toggle-left-area")
        notebook.run("setup")
        use(run_live(notebook, "knobs"))
        for theme in ("light", "dark"):
            notebook.theme(theme)
            path = IMAGES / f"widget-{theme}.png"
            notebook.picture("knobs", path)
            optimise(path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def main() -> None:
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium on PATH")
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        labs, home = Path(name, "labs"), Path(name, "home")
        labs.mkdir()
        home.mkdir()
        shutil.copy(ROOT / "labs" / LAB, labs)
        with jupyter(labs, home, mark) as server:
            take(server, executable, mark)


if __name__ == "__main__":
    main()

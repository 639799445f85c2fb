"""`write_whole`: what may be written to is, whole; what may not be is not touched."""

from __future__ import annotations

import os
import select
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from overlaplab.files import write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_device_is_written_to_and_stays_one(tmp_path: Path):
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        write_whole(null, b"page")
    except PermissionError:
        pytest.skip("only root makes devices, and not everywhere")
    assert stat.S_ISCHR(null.stat().st_mode) and names(tmp_path) == ["null"]


def test_a_pipe_gets_the_data_and_stays_one(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    opened = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(opened, True)

    def read() -> None:
        with os.fdopen(opened, "rb") as file:
            select.select([file], [], [])
            got.append(file.read())

    data = b"page" * 100_000  # more than a pipe holds
    reader = threading.Thread(target=read)
    reader.start()
    write_whole(pipe, data)
    reader.join()
    assert got == [data] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_a_pipe_that_nobody_reads_is_refused_and_waits_for_nobody(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe"):
        write_whole(pipe, b"page")


@pytest.mark.parametrize("name", ["/dev/stdout", "out"])
def test_the_file_that_output_goes_to_gets_the_data_behind_it(
    tmp_path: Path, name: str
):
    program = (
        "from overlaplab.files import write_whole\n"
        f"print('before'); write_whole({name!r}, b'page\\n'); print('after')"
    )
    with open(tmp_path / "out", "wb") as out:
        subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, stdout=out, check=True
        )
        assert os.path.samestat(os.fstat(out.fileno()), os.stat(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == b"before\npage\nafter\n"
    assert names(tmp_path) == ["out"]


def test_a_folder_is_refused_by_its_name(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        write_whole(folder, b"page")
    assert names(tmp_path) == ["folder"] and names(folder) == []


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "a", tmp_path / "link"
    link.symlink_to(target)  # which is not there yet
    for data in (b"first", b"second"):
        write_whole(link, data)
        assert link.is_symlink() and target.read_bytes() == data
    assert names(tmp_path / "far") == ["a"]


def test_modes_and_hard_links_stay(tmp_path: Path):
    private, other = tmp_path / "private", tmp_path / "other"
    private.write_bytes(b"a long first content")
    private.chmod(0o600)
    write_whole(private, b"new")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    other.hardlink_to(private)
    write_whole(private, b"newer")
    assert other.read_bytes() == b"newer" and private.samefile(other)
    assert names(tmp_path) == ["other", "private"]


def test_a_file_that_nobody_may_write_is_refused_for_root_too(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.write_bytes(b"old")
    kept.chmod(0o444)
    with pytest.raises(PermissionError, match="kept"):
        write_whole(kept, b"new")
    assert kept.read_bytes() == b"old" and names(tmp_path) == ["kept"]


KILLED = """
import os, signal, sys
os.replace = lambda *of: os.kill(os.getpid(), signal.SIGKILL)
from overlaplab.files import write_whole
write_whole(sys.argv[1], b"half")
"""


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path,
):
    path = tmp_path / "a"
    subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    (left,) = names(tmp_path)
    dead = left.split("-")[-1].split(".")[0]
    living = left.replace(f"-{dead}.", f"-{os.getppid()}.")
    assert living != left
    (tmp_path / living).write_bytes(b"half")
    write_whole(path, b"whole")
    assert names(tmp_path) == sorted(["a", living])
    assert path.read_bytes() == b"whole"


def test_a_missing_folder_is_an_error_of_the_path_that_was_given(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none/a'$"):
        write_whole(tmp_path / "none" / "a", b"page")

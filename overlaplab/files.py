"""Files: written so that a break in the middle leaves no half of one; HTML pages."""

from __future__ import annotations

import errno
import os
import platform
import stat
import sys
import tempfile
from contextlib import suppress
from html import escape
from pathlib import Path

_PART = ".part"  # of a file that is being written


def html_page(title: str, style: str, body: str) -> str:
    """An HTML page that needs nothing else; the title is plain text, the body HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n"
        f"</head>\n<body>\n{body}</body>\n</html>\n"
    )


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write beside the target, then rename; a file that was there stays till then.

    A symbolic link stays, and its target is written; so do a file's mode, owner and
    hard links (a file of several names is written in place). Into a device or a pipe
    the data go as into any, and so they do into the file that what is printed goes to
    (/dev/stdout): behind it. What a writer that was killed left beside it is removed.

    Raises:
        OSError: the folder is missing or not writable, the path is a folder, a file
            that nobody may write, or a pipe that nobody reads; nothing is left behind.
    """
    try:
        target = Path(os.path.realpath(path))
        there = _status(target)
        if there is not None and stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if there is not None and not stat.S_ISREG(there.st_mode):
            _write_into(target, data, os.O_WRONLY | os.O_NONBLOCK)
            return
        if there is not None and (output := _output_into(there)) is not None:
            _write_behind(output, data)
            return
        if there is not None and not _may_write(target, there):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        prefix = f".{target.name[:40]}.{platform.node()[:20]}-"
        _remove_leftovers(target.parent, prefix)
        _write_beside(target, data, there, f"{prefix}{os.getpid()}.")
    except OSError as error:
        if error.errno is None:
            raise
        # The file as the caller calls it, and not the one beside it.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _output_into(there: os.stat_result) -> int | None:
    """The standard output or error of this process, if it is that file."""
    for output in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(there, os.fstat(output)):
                return output
    return None


def _write_behind(output: int, data: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with os.fdopen(os.dup(output), "wb") as file:
        file.write(data)


def _may_write(path: Path, there: os.stat_result) -> bool:
    """By its mode, which root obeys too."""
    return bool(there.st_mode & 0o222) and os.access(path, os.W_OK)


def _write_beside(
    target: Path, data: bytes, there: os.stat_result | None, prefix: str
) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=_PART)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if there is not None and there.st_nlink > 1:
            _write_into(target, data, os.O_WRONLY)  # the disk has had room for it
            os.unlink(name)
            return
        if there is None:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)  # mkstemp makes it private
        else:
            with suppress(PermissionError):  # not ours to give away
                os.chown(name, there.st_uid, there.st_gid)
            os.chmod(name, stat.S_IMODE(there.st_mode))
        os.replace(name, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _write_into(path: Path, data: bytes, flags: int) -> None:
    handle = os.open(path, flags)
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            file.truncate()


def _remove_leftovers(folder: Path, prefix: str) -> None:
    """Files beside the target whose writer, a process of this machine, is gone."""
    with os.scandir(folder) as inside:
        names = [
            entry.name
            for entry in inside
            if entry.name.startswith(prefix) and entry.name.endswith(_PART)
        ]
    for name in names:
        writer = name[len(prefix) :].partition(".")[0]
        if writer.isdecimal() and not _is_running(int(writer)):
            with suppress(OSError):
                os.unlink(folder / name)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True

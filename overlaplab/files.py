"""Files: written so that a break in the middle leaves no half of one; HTML pages."""

from __future__ import annotations

import os
import tempfile
from html import escape
from pathlib import Path


def html_page(title: str, style: str, body: str) -> str:
    """An HTML page that needs nothing else.

    Args:
        title: plain text.
        style: a style sheet.
        body: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n"
        f"</head>\n<body>\n{body}</body>\n</html>\n"
    )


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write beside the target, then rename; a file that was there stays till then.

    Raises:
        OSError: the folder is missing or not writable; nothing is left behind.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    except OSError as error:
        error.filename = str(path)  # not the file beside it
        raise
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError) and error.filename is not None:
            error.filename, error.filename2 = str(path), None
        raise

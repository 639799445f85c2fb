"""Make the course as a site: `make site` writes build/site/html, without a network.

The pages are the documents of the repository and the solved notebooks, each at its
own path. Solutions and what checks print are folded. A link from one page to another
stays a link, a link to another file becomes a download, and one to a folder becomes
plain text. At the end every link within the site is followed.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from urllib.parse import unquote, urlsplit

import nbformat
from bs4 import BeautifulSoup
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build/site"
DOCUMENTS = (
    "README.md",
    "course/index.md",
    "course/nsight.md",
    "course/prediction.md",
    "course/instructors.md",
    "overlaplab/bench/results/README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
LESSONS = tuple(f"labs/{path.name}" for path in sorted(ROOT.glob("labs/*.ipynb")))
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
PICTURE = re.compile(r'src(?:set)?="([^":]+)"')  # of HTML
NOTE = """```{note}
This page is the solved lesson, with solutions folded. To work on it, set the course up
as [the start page](../README.md) says: `make lab` opens the notebooks.
```"""
CONTENTS = """
```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```
"""


def page(path: str) -> str:
    """Where the site has the page that is made from this file of the repository."""
    return "index.md" if path == "README.md" else path


def relinked(text: str, path: str) -> str:
    """A document's text with its links as they lead from the document's page."""
    folder = str(PurePosixPath(page(path)).parent)

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        file, _, anchor = target.partition("#")
        if "://" in target or not file:
            return found[0]
        there = normpath(PurePosixPath(path).parent / file)
        if (ROOT / there).is_dir():
            return words
        if there not in (*DOCUMENTS, *LESSONS):
            copy(there, OUT / "source")
        to = relpath(page(there), folder) + (f"#{anchor}" if anchor else "")
        return f"{picture}[{words}]({to})"

    for file in PICTURE.findall(text):
        copy(normpath(PurePosixPath(path).parent / file), OUT / "html")
    return LINK.sub(link, text)


def copy(path: str, to: Path) -> None:
    (to / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, to / path)


def lesson(path: str) -> nbformat.NotebookNode:
    """The solved notebook, its solutions and verdicts folded."""
    notebook: nbformat.NotebookNode = nbformat.read(
        ROOT / "solutions" / Path(path).name, as_version=4
    )
    for cell in notebook.cells:
        tags = cell.metadata.setdefault("tags", [])
        if cell.cell_type == "markdown":
            cell.source = relinked(cell.source, path)
            if cell is not notebook.cells[0]:  # a page has one title
                cell.source = re.sub(r"^# ", "## ", cell.source)
        elif "exercise" in tags:
            tags.append("hide-input")
            cell.metadata["mystnb"] = {"code_prompt_show": "Show a solution"}
        elif "check" in tags:
            tags.append("hide-output")
            cell.metadata["mystnb"] = {"code_prompt_show": "Show the verdict"}
        elif cell.metadata.get("jupyter", {}).get("source_hidden"):
            tags.append("hide-input")
        said = [
            output.metadata.get("image/png", {}).get("alt", "")
            for output in cell.get("outputs", ())
            if "image/png" in output.get("data", {})
        ]
        if said:  # one text for all figures of a cell: MyST-NB knows no other
            image = {"alt": " ".join(said)}
            cell.metadata.setdefault("mystnb", {})["image"] = image
    title, _, rest = notebook.cells[0].source.partition("\n")
    note = relinked(NOTE, path)
    notebook.cells[0].source = f"{title}\n\n{note}\n{rest}"
    return notebook


def gather() -> None:
    """Write the site's sources from the repository."""
    shutil.rmtree(OUT, ignore_errors=True)
    for path in DOCUMENTS:
        target = OUT / "source" / page(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = relinked((ROOT / path).read_text("utf-8"), path)
        if path == "README.md":
            text += contents("Lessons", ("course/index.md", *LESSONS))
            text += contents("More", DOCUMENTS[2:])
        target.write_text(text, "utf-8")
    (OUT / "source/labs").mkdir()
    for path in LESSONS:
        nbformat.write(lesson(path), OUT / "source" / path)


def contents(caption: str, pages: tuple[str, ...]) -> str:
    """A part of the sidebar; a lesson's number stands before its question."""
    lines = []
    for path in pages:
        name = str(PurePosixPath(path).with_suffix(""))
        if path in LESSONS:
            question = lesson(path).cells[0].source.partition("\n")[0].lstrip("# ")
            name = f"{PurePosixPath(path).name[:2]} {question} <{name}>"
        lines.append(name)
    return CONTENTS.format(caption=caption, pages="\n".join(lines))


def dead_links(html: Path) -> Iterator[str]:
    """Each link within the site that leads nowhere, as `page: link`."""
    pages = {
        path: BeautifulSoup(path.read_text("utf-8"), "html.parser")
        for path in html.rglob("*.html")
    }
    names = {path: {tag["id"] for tag in soup(id=True)} for path, soup in pages.items()}
    for path, soup in pages.items():
        links = {str(tag["href"]) for tag in soup("a", href=True)}
        links |= {str(tag["src"]) for tag in soup("img", src=True)}
        for link in sorted(links):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            there = (
                path if not url.path else (path.parent / unquote(url.path)).resolve()
            )
            missing = not there.exists()
            if missing or (
                url.fragment and url.fragment not in names.get(there, set())
            ):
                yield f"{path.relative_to(html)}: {link}"


def main() -> int:
    gather()
    html = (OUT / "html").resolve()
    app = Sphinx(
        srcdir=OUT / "source",
        confdir=Path(__file__).parent,
        outdir=html,
        doctreedir=OUT / "doctrees",
        buildername="html",
        warningiserror=True,
        status=None,
    )
    app.build()
    if app.statuscode:
        return app.statuscode
    dead = list(dead_links(html))
    print(*(f"leads nowhere: {link}" for link in dead), sep="\n")
    print(f"{len(dead)} dead links. Open {html / 'index.html'}")
    return min(len(dead), 1)


if __name__ == "__main__":
    sys.exit(main())

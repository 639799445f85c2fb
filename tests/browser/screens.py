"""Pictures of every screen of the solved labs, for a person to look at.

    python -m tests.browser.screens FOLDER [06 ...] [--run] [--colors]

Opens each solved lab in JupyterLab as it is stored (`--run` runs it first), light and
dark, 1280 and 1920 pixels wide, and writes FOLDER/06-dark-1280-003.png: one picture for
each screen from top to bottom. `--colors` writes some stored figures instead, as people
with deuteranopia and with protanopia see them.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import nbformat
import numpy as np
from PIL import Image
from playwright.sync_api import Browser

from tests.browser.jupyter import Jupyter, jupyter
from tests.browser.notebook import Notebook, chromium
from tests.browser.processes import find_chromium

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 1920)
THEMES = ("light", "dark")
MOST_SCREENS = 120
RUN_TIMEOUT_MS = 600_000  # a guard: a busy machine does not come near it
SCROLL = """async (screens) => {
  const panel = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden)');
  const outer = panel.querySelector('.jp-WindowedPanel-outer');
  const before = outer.scrollTop;
  outer.scrollTop = screens === 0 ? 0 : before + outer.clientHeight - 60;
  for (let k = 0; k < 12; k++) await new Promise(requestAnimationFrame);
  return outer.scrollTop !== before;
}"""
# Linear RGB as people see it who lack one kind of cone, after Machado, Oliveira and
# Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency"
# (2009), the strongest degree.
CONES: Mapping[str, list[list[float]]] = {
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}
# Cells with many colours beside one another.
FIGURES = (
    ("02_measuring", "two"),
    ("03_streams", "flat-seen"),
    ("06_bucketing", "knobs"),
    ("06_bucketing", "sweep"),
    ("08_double_buffering", "slots-seen"),
    ("10_zero3_prefetch", "waste"),
    ("16_checkpointing", "curve"),
)
PAPER = {"light": "#ffffff", "dark": "#111111"}


def seen_by(picture: Image.Image, cones: str) -> Image.Image:
    """The picture as somebody sees it who lacks these cones."""
    red_green_blue = np.asarray(picture.convert("RGB")) / 255
    linear = np.where(
        red_green_blue <= 0.04045,
        red_green_blue / 12.92,
        ((red_green_blue + 0.055) / 1.055) ** 2.4,
    )
    seen = np.clip(linear @ np.array(CONES[cones]).T, 0, 1)
    back = np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)
    return Image.fromarray((255 * back).round().astype(np.uint8))


def figures_of(stem: str, cell_id: str) -> Iterator[Image.Image]:
    """The stored figures of a cell."""
    notebook = nbformat.read(ROOT / "solutions" / f"{stem}.ipynb", as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()) if cell.id == cell_id else ():
            if png := output.get("data", {}).get("image/png"):
                yield Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA")


def take_colors(folder: Path) -> None:
    """Each figure on light and dark paper: as it is, and as two others see it."""
    for stem, cell_id in FIGURES:
        for figure in figures_of(stem, cell_id):
            for theme, paper in PAPER.items():
                page = Image.new("RGBA", figure.size, paper)
                page.alpha_composite(figure)
                rows = [page.convert("RGB"), *(seen_by(page, c) for c in CONES)]
                sheet = Image.new("RGB", (page.width, page.height * len(rows)))
                for place, row in enumerate(rows):
                    sheet.paste(row, (0, place * page.height))
                sheet.save(folder / f"{stem[:2]}-{cell_id}-{theme}.png")


def take_lab(
    browser: Browser, server: Jupyter, name: str, folder: Path, *, run: bool
) -> None:
    """All screens of one solved lab in both themes and widths."""
    for width in WIDTHS:
        notebook = Notebook(browser, server, name, width=width)
        if run and width == WIDTHS[0]:
            notebook.page.set_default_timeout(RUN_TIMEOUT_MS)
            notebook.command("notebook:run-all-cells")
            notebook.command("docmanager:save")  # the next width shows its outputs
        for theme in THEMES:
            notebook.theme(theme)
            for number in range(MOST_SCREENS):
                if not notebook.page.evaluate(SCROLL, number) and number:
                    break
                path = folder / f"{name[:2]}-{theme}-{width}-{number:03}.png"
                notebook.page.screenshot(path=path, animations="disabled")
            print(f"{name}, {theme}, {width}: {number} screens", flush=True)
        notebook.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("topics", nargs="*", help="only labs that start so: 06")
    parser.add_argument("--run", action="store_true", help="run each lab first")
    parser.add_argument("--colors", action="store_true", help="figures through filters")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.colors:
        take_colors(options.folder)
        return
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium on PATH")
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        labs, home = Path(name, "solutions"), Path(name, "home")
        shutil.copytree(ROOT / "solutions", labs)
        home.mkdir()
        with jupyter(labs, home, mark) as server, chromium(executable, mark) as browser:
            for path in sorted(labs.glob("*.ipynb")):
                if path.name.startswith(tuple(options.topics) or ("",)):
                    run = options.run
                    take_lab(browser, server, path.name, options.folder, run=run)


if __name__ == "__main__":
    main()

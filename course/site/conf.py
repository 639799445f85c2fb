"""Sphinx's settings for the site that make_site.py gathers."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from docutils import nodes
from matplotlib.mathtext import math_to_image
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

project = "overlaplab"
extensions = ["myst_nb", "sphinxcontrib.mermaid"]
html_theme = "sphinx_book_theme"
html_title = "overlaplab"
html_theme_options = {
    "use_download_button": False,  # it would give the solved notebook away
    "show_toc_level": 2,
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
nb_execution_mode = "off"  # course/build.py has run the cells
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]


def drawn(formula: str) -> str:
    """A formula as an inline SVG in the colour of the text around it."""
    file = io.StringIO()
    settings: Any = {"mathtext.fontset": "cm", "svg.hashsalt": formula}
    with matplotlib.rc_context(settings):
        depth = math_to_image(f"${formula}$", file, format="svg", color="#010203")
    svg = file.getvalue().partition("<svg")[2].replace("#010203", "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Two formulas of a page must not share the names of their glyphs and clips.
    return f'<svg role="img" style="vertical-align: -{depth:.1f}px"{svg}'


class DrawnFormulas(SphinxPostTransform):
    """matplotlib draws the formulas: a page needs no MathJax from afar."""

    default_priority = 10  # type: ignore[assignment]

    def run(self, **kwargs: Any) -> None:
        for kind in (nodes.math, nodes.math_block):
            for node in list(self.document.findall(kind)):
                svg = nodes.raw(
                    "", drawn(" ".join(node.astext().split())), format="html"
                )
                inline = isinstance(node, nodes.math)
                node.replace_self(svg if inline else nodes.paragraph("", "", svg))


def setup(app: Sphinx) -> None:
    app.add_post_transform(DrawnFormulas)

"""An instructor's comment as HTML: the Markdown with mathematics that formgrader shows.

A feedback page runs no script, so formulas are pictures. Matplotlib draws the subset of LaTeX that it knows.
Other formulas are shown as LaTeX.
"""

from __future__ import annotations

import base64
import io
from functools import cache

import mistune
from markupsafe import Markup, escape

SIZE = 12  # points of the text around a formula


class _Renderer(mistune.HTMLRenderer):
    """The renderer of the plug-in ``math``, with pictures."""

    def inline_math(self, text: str) -> str:
        return _formula(text)

    def block_math(self, text: str) -> str:
        return f"<p>{_formula(text)}</p>\n"


def comment_html(comment: str) -> Markup:
    """Return ``comment``, which is Markdown, as HTML. HTML in it is escaped."""
    return Markup(_markdown()(comment))


@cache
def _markdown() -> mistune.Markdown:
    return mistune.create_markdown(
        renderer=_Renderer(escape=True), plugins=["math", "strikethrough", "table"]
    )


@cache
def _formula(text: str) -> str:
    import matplotlib as mpl
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    source, file = " ".join(text.split()), io.BytesIO()
    try:
        with mpl.rc_context({"savefig.facecolor": "none"}):
            depth = math_to_image(f"${source}$", file, prop=FontProperties(size=SIZE), dpi=72, format="svg")
    except ValueError:  # matplotlib does not know a command
        return f"<code>${escape(source)}$</code>"
    address = base64.b64encode(file.getvalue()).decode("ascii")
    down = f"vertical-align:-{depth / SIZE:.2f}em"
    return f'<img style="{down}" src="data:image/svg+xml;base64,{address}" alt="{escape(source)}">'

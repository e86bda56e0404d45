"""Formulas as pictures: a page shows them without MathJax, and so without a network.

matplotlib sets the TeX between dollars; it knows a part of TeX. The pictures are SVG in the text, with the
color of the text. Used by the slides.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

FORMULA = re.compile(
    r"(?P<code>(`+).+?\2)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$", re.DOTALL
)
SIZE = 10.0  # points of the letters; one em of the page
LETTERS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}  # of a path in SVG, by the codes of matplotlib.path.Path


def with_formulas(markdown: str) -> str:
    """Return the text with a picture in place of each formula; code stays as it is.

    Raises:
        UserError: matplotlib cannot set a formula.
    """

    def drawn(found: re.Match[str]) -> str:
        if found["block"] is not None:
            return f'\n\n<div class="formula">{svg(found["block"])}</div>\n\n'
        return svg(found["inline"]) if found["inline"] is not None else found[0]

    return FORMULA.sub(drawn, markdown)


@cache
def svg(tex: str) -> str:
    """Return the formula as an ``<svg>`` element on one line, in the size of the text around it.

    Raises:
        UserError: matplotlib cannot set the formula.
    """
    from matplotlib.textpath import TextPath  # a second to load, which other commands do not need

    one_line = " ".join(tex.split())
    try:
        path = TextPath((0, 0), f"${one_line}$", size=SIZE)
    except ValueError as error:
        raise UserError(
            tr("matplotlib cannot set the formula {tex}: write it with other commands of TeX", tex=one_line)
        ) from error
    steps = [
        LETTERS[int(code)] + ("" if int(code) == 79 else " ".join(f"{number:.2f}" for number in points))
        for points, code in path.iter_segments(simplify=False)
    ]
    box = path.get_extents()
    style = f"height:{box.height / SIZE:.3f}em;vertical-align:{box.y0 / SIZE:.3f}em"
    return (
        f'<svg role="img" aria-label="{escape(one_line)}" style="{style}" '
        f'viewBox="{box.x0:.2f} {-box.y1:.2f} {box.width:.2f} {box.height:.2f}">'
        f'<path transform="scale(1,-1)" fill="currentColor" d="{"".join(steps)}"/></svg>'
    )

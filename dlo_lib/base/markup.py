"""HTML for notebooks and slides, from the files in ``templates/``. Jinja2 escapes every text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from dlo_lib.base.text import blocks, tr

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


_CODE = re.compile(r"`([^`\n]+)`")


def render(template: str, **values: object) -> str:
    """Return the HTML of ``template`` (``table`` for ``table.html.j2``) with ``values``.

    Raises:
        jinja2.UndefinedError: a value that the template uses is missing.
    """
    return environment("dlo_lib.base").get_template(f"{template}.html.j2").render(**values)


def message_html(message: str, inline: Callable[[str], str] | None = None) -> Markup:
    """Return a message as HTML, with its tables as tables.

    Args:
        inline: formats the texts between the tables; the result is escaped unless it is ``Markup``. None for
            ``code_html``.
    """
    from markupsafe import Markup

    return Markup(render("message", blocks=blocks(message), inline=inline or code_html))


def code_html(text: str) -> Markup:
    """Return escaped text as HTML, with `code` between backquotes as ``<code>``."""
    from markupsafe import Markup, escape

    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


@cache
def environment(package: str) -> Environment:
    """Return the environment of the templates in the folder ``templates`` of ``package``."""
    # Imported here, because the command line rarely needs it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["tr"] = tr
    made.filters["code"] = code_html
    return made

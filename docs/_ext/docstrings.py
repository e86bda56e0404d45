"""Docstrings in the style of the library: what is indented below a sentence is shown unchanged.

The docstrings are written to be read in the code. Formulas, tables and sketches are indented, without the
``::`` that reStructuredText expects, and ``*``, ``|`` and a final ``_`` may be signs of a formula.
"""

import re
from collections.abc import Iterator

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Examples?|Note|Papers?|Sources?|Reference):$")
ITEM = re.compile(r"(-|\*|\d+\.) ")
UNCHANGED = re.compile(
    r"(``.+?``|:[a-z:]+:`[^`]+`|`[^`]+`_?|(?<![\w*])\*(?![\s*])[^*]*[^\s*]\*(?![\w*]))", re.DOTALL
)
"""Code, a role, a link, and emphasis."""

SEVERAL = re.compile(r"^(?= *:(?:param|ivar) )( *:\w+ )(\w+(?:, \w+)+)(?=:)")
"""The field that `napoleon` makes of an item such as ``p, m: the sizes``."""


def process(app, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Rewrite the lines of a docstring in place."""
    lines[:] = [line for paragraph in marked(lines) for line in paragraph]


def join_names(app, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Rewrite, in place, the fields that describe several names: Sphinx would take all names except the last
    for a type. What stays between two names is no white space: a zero-width space, where a line may end."""
    lines[:] = [
        SEVERAL.sub(lambda found: found[1] + found[2].replace(", ", ",\u200b"), line) for line in lines
    ]


def marked(lines: list[str]) -> Iterator[list[str]]:
    """Yield the parts of a docstring: text, escaped, and blocks with the mark ``::`` before them."""
    above, section, before_blank = "", False, True
    paragraph: list[str] = []
    rest = list(lines)
    while rest:
        line = rest[0]
        text = line.strip()
        if not text:
            yield [*escaped(paragraph), line]
            paragraph, before_blank = [], True
            rest.pop(0)
            continue
        if text.startswith((">>>", "====", "+--")):  # an example or a table ends with an empty line
            yield escaped(paragraph)
            paragraph = []
            while rest and rest[0].strip():
                yield [rest.pop(0)]
            continue
        section = bool(SECTION.match(text)) or (section and depth(line) > 0)
        if is_block(line, above, section, before_blank):
            yield escaped(paragraph)
            paragraph = []
            block = []
            while rest and (not rest[0].strip() or depth(rest[0]) > depth(above)):
                block.append(rest.pop(0))
            mark = [] if above.endswith("::") else ["", " " * depth(above) + "::", ""]
            yield [*mark, *block, ""]
            before_blank = True
            continue
        paragraph.append(line)
        above, before_blank = line, False
        rest.pop(0)
    yield escaped(paragraph)


def is_block(line: str, above: str, section: bool, after_blank: bool) -> bool:
    """Whether a line begins a block that is to be shown unchanged.

    It is deeper than the text above it. Below an item of a list or an argument, a deeper line continues it.
    """
    if not above.strip() or depth(line) <= depth(above) or SECTION.match(above.strip()):
        return False
    return after_blank and not ITEM.match(above.strip()) if section or after_blank else depth(line) >= 4


def escaped(paragraph: list[str]) -> list[str]:
    """Return the lines of a paragraph whose ``*``, ``|`` and final ``_`` mean themselves."""
    parts = UNCHANGED.split("\n".join(paragraph))
    for i in range(0, len(parts), 2):
        text = re.sub(r"(?<!^)(?<!\n)(?<!\n )\*|\*(?! )", r"\\*", parts[i])
        parts[i] = re.sub(r"(\w)_(?!\w)", r"\1\\_", text).replace("|", r"\|")
    text = re.sub(r"(?<=[^\s(/]``)(?=\w)", r"\\ ", "".join(parts))  # ``Unit``s
    return text.split("\n") if paragraph else []


def depth(line: str) -> int:
    """Return the number of spaces before the text."""
    return len(line) - len(line.lstrip())


def setup(app) -> dict:
    """Rewrite docstrings before `napoleon` reads their sections, and the fields that it makes of them."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-docstring", join_names, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

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


def process(app, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Rewrite the lines of a docstring in place."""
    lines[:] = [line for paragraph in marked(lines) for line in paragraph]


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
    """Rewrite docstrings before `napoleon` reads their sections."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

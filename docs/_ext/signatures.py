"""Signatures for readers: the options of a configuration are a table, and defaults are as in the code."""

import dataclasses
import enum
import re
import typing
from collections.abc import Iterator

NAME = re.compile(r"~(?:\w+\.)*(\w+)")


def process(
    app, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Return the signature and the result of a name as they are shown, or None to keep them."""
    if list(rows(thing)):
        return "(**options)", returns
    if signature and "<" in signature:  # a default that is no expression: Sphinx shows the text unchanged
        return NAME.sub(r"\1", signature), returns and NAME.sub(r"\1", returns)
    return None


def add_table(app, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Append the table of a configuration's options to its docstring."""
    table = list(rows(thing))
    if table:
        lines += ["", ".. list-table::", "   :header-rows: 1", ""]
        for row in [("option", "default", "meaning"), *table]:
            lines += [
                f"   {'-' if i else '* -'} {cell}".replace("   -", "     -") for i, cell in enumerate(row)
            ]
        lines.append("")


def rows(thing: object) -> Iterator[tuple[str, str, str]]:
    """Yield option, default and meaning of each field of a dataclass whose annotations hold a help text."""
    if not (isinstance(thing, type) and dataclasses.is_dataclass(thing)):
        return
    hints = typing.get_type_hints(thing, include_extras=True)
    for field in dataclasses.fields(thing):
        for extra in getattr(hints[field.name], "__metadata__", ()):
            if hasattr(extra, "help"):
                default = field.default.value if isinstance(field.default, enum.Enum) else field.default
                shown = "" if default is dataclasses.MISSING or default in ("", None) else f"``{default}``"
                yield f"``{field.name}``", shown, extra.help.replace("*", r"\*").replace("|", r"\|")


def skip(app, what: str, name: str, thing: object, skipped: bool, options: object) -> bool | None:
    """Leave out methods that another package has added to a class."""
    if callable(thing) and not isinstance(thing, type):
        home = getattr(thing, "__module__", None) or "dlo_lib"
        return True if not home.startswith("dlo_lib") else None
    return None


def setup(app) -> dict:
    """Connect the functions above."""
    app.connect("autodoc-process-signature", process)
    app.connect("autodoc-process-docstring", add_table, priority=900)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

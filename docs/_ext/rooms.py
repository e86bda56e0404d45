"""The pages of the API: ``<!-- room: dlo_lib.kernels -->`` becomes the room's modules in reading order, each
with its docstring and the public names that it defines.

The public names of a room are those of ``__all__``; without it, those of the modules that its docstring
lists. A line may name several rooms or modules, separated by spaces.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

MARK = re.compile(r"^<!-- room: ([\w. ]+) -->$", re.MULTILINE)
LISTED = re.compile(r"^- ``(\w+)``:", re.MULTILINE)


def expand(app, docname: str, source: list[str]) -> None:
    """Replace the marks of a page."""
    source[0] = MARK.sub(lambda found: joined("\n".join(page(found[1].split()))), source[0])


def joined(text: str) -> str:
    """Return the text with one block for directives that follow each other: each block starts a parser."""
    return text.replace("```\n\n```{eval-rst}\n", "\n")


def page(names: list[str]) -> Iterator[str]:
    """Yield the lines of rooms and modules; a room that has the page alone has no heading."""
    top = "##" if len(names) == 1 else "###"
    for name in names:
        room = importlib.import_module(name)
        heading = [f"## {name.removeprefix('dlo_lib.')}", ""] if len(names) > 1 else []
        yield from [*heading, *directive("automodule", name, "no-members")]
        if not hasattr(room, "__path__"):
            yield from members(room, public(room))
        elif hasattr(room, "__all__"):
            yield from exported(room, top)
        else:
            for below in listed(room):
                module = importlib.import_module(f"{name}.{below}")
                if not hasattr(module, "__path__") and public(module):
                    yield from [*text_of(module, top), *members(module, public(module))]


def exported(room: ModuleType, top: str) -> Iterator[str]:
    """Yield the lines of the names in ``__all__``, by the modules that define them."""
    homes = imported(room)
    order = listed(room)

    def position(home: str) -> tuple[int, str]:
        below = home.removeprefix(room.__name__ + ".").split(".")[0]
        return (order.index(below) if below in order else len(order)), home

    for home in sorted({home for home, _ in homes.values()}, key=position):
        module = importlib.import_module(home)
        if home.startswith(room.__name__ + "."):
            yield from text_of(module, top)
        elif home != room.__name__:
            yield from [f"{top} From `{home.removeprefix('dlo_lib.')}`", ""]
        place = line_of(module)
        names = sorted((place(there), name) for name, (where, there) in homes.items() if where == home)
        for _, name in names:
            yield from member(getattr(room, name), f"{room.__name__}.{name}", f"{home}.{homes[name][1]}")


def imported(room: ModuleType) -> dict[str, tuple[str, str]]:
    """Return for each name of ``__all__`` the module that defines it, and its name there."""
    homes = {name: (room.__name__, name) for name in room.__all__}
    for statement in ast.parse(inspect.getsource(room)).body:
        for alias in statement.names if isinstance(statement, ast.ImportFrom) else []:
            name = alias.asname or alias.name
            thing = getattr(room, name)
            if name in homes and inspect.ismodule(thing):
                del homes[name]  # a room below, which has its page
            elif name in homes:
                # The attribute of another object is that of its class.
                home = getattr(thing, "__module__", None) if callable(thing) else None
                homes[name] = (home or str(statement.module), alias.name)
    return homes


def listed(room: ModuleType) -> list[str]:
    """Return the modules of a room in reading order."""
    return LISTED.findall(room.__doc__ or "")


def public(module: ModuleType) -> list[str]:
    """Return the classes and functions with a docstring that a module defines."""
    found = [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and getattr(thing, "__module__", None) == module.__name__
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__doc__
    ]
    return sorted(found, key=line_of(module))


def line_of(module: ModuleType):
    """Return a key that sorts names as their module defines them."""
    lines = inspect.getsource(module).splitlines()

    def key(name: str) -> int:
        defined = re.compile(rf"(class|def|async def) {name}\b|{name}\b *[:=]")
        return next((number for number, line in enumerate(lines) if defined.match(line)), len(lines))

    return key


def text_of(module: ModuleType, top: str) -> list[str]:
    """Return the lines that show the docstring of a module below its name, a heading of the level ``top``."""
    name = module.__name__
    return [f"{top} {name.rpartition('.')[2]}", "", *directive("automodule", name, "no-members", "no-index")]


def members(module: ModuleType, names: list[str]) -> Iterator[str]:
    """Yield the lines of classes and functions that are imported from their module."""
    for name in names:
        path = f"{module.__name__}.{name}"
        yield from member(getattr(module, name), path, path)


def member(thing: object, path: str, home: str) -> list[str]:
    """Return the lines of one name, which a user imports as ``path``."""
    if inspect.isclass(thing):
        return directive("autoclass", path)
    return directive("autofunction", path) if callable(thing) else directive("autodata", home, "no-value")


def directive(kind: str, name: str, *options: str) -> list[str]:
    """Return the lines of a directive of `autodoc` in a Markdown page."""
    return ["```{eval-rst}", f".. {kind}:: {name}", *(f"   :{option}:" for option in options), "```", ""]


def setup(app) -> dict:
    """Expand the marks when a page is read."""
    app.connect("source-read", expand)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

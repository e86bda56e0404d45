"""The modules of the user's project that a program or a function imports, found without running it.

The files are parsed, and each import is searched as Python would: first in the folder of the program, then
along the module path, with the folders that the program adds to it (``path_changes``). Modules of the
environment (the standard library, installed packages, this library) are not of the project. An import by a
computed name cannot be followed, which the result has as ``computed``; so has ``notes`` what was not found.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.cluster.code.path_changes import PathChanges, changes

_LIBRARY = "dlo_lib"  # part of the environment, as PyTorch is
_SUFFIXES = (*importlib.machinery.EXTENSION_SUFFIXES, ".py")


@dataclass(frozen=True)
class Module:
    """A file of the project; ``name`` is its dotted name, "" for a program, found below ``entry``."""

    name: str
    file: Path
    entry: Path

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.file.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass
class Imports:
    """What is imported.

    Attributes:
        modules: by their files, programs included.
        entries: folders of the module path that hold them, in its order.
        added: folders that the modules add to the module path.
        computed: whether a module imports by a name that is computed when it runs.
        absent: names that a module certainly imports and that are found nowhere, by its file.
        unclear: lines that add a computed folder to the module path, by file.
    """

    modules: dict[Path, Module] = field(default_factory=dict)
    entries: list[Path] = field(default_factory=list)
    added: set[Path] = field(default_factory=set)
    computed: bool = False
    absent: dict[Path, list[str]] = field(default_factory=dict)
    unclear: dict[Path, list[int]] = field(default_factory=dict)

    def notes(self) -> Iterator[str]:
        """Yield a line for each file with imports that cannot be followed, for the user."""
        later = tr("what it finds there is not copied, so a later edit reaches the job")
        for file, lines in sorted(self.unclear.items()):
            line = ", ".join(map(str, lines))
            what = "note: {file}, line {line}, adds a computed folder to the module path: {later}"
            yield tr(what, file=file.name, line=line, later=later)
        later = tr("if the job finds it, it is not a copy, so a later edit reaches the job")
        for file, names in sorted(self.absent.items()):
            what = "note: {file} imports {names}, which is not found here: {later}"
            yield tr(what, file=file.name, names=", ".join(sorted(set(names))), later=later)


def follow(programs: Sequence[Path], names: Iterable[str], path: Sequence[str] | None = None) -> Imports:
    """Return the modules of the project that programs and named modules import, themselves included.

    Args:
        programs: files that Python runs.
        names: dotted names; those of other projects and of no module are left out.
        path: the module path; None: that of this process.
    """
    beside = list(dict.fromkeys(program.parent for program in programs))
    given = [Path(entry or ".").resolve() for entry in (sys.path if path is None else path)]
    first, last = list[Path](), list[Path]()
    while True:
        search = list(dict.fromkeys((*first, *beside, *(one for one in given if one.is_dir()), *last)))
        found, added = _follow(programs, names, search)
        new_first, new_last = _usable(reversed(added.first)), _usable(added.last)
        if {*new_first, *new_last} <= {*first, *last}:
            break
        first, last = new_first, new_last  # with them, more modules are found, which may add further ones
    found.added = {*first, *last}
    used = {module.entry for module in found.modules.values()}
    found.entries = [entry for entry in search if entry in used]
    found.entries += sorted(used.difference(found.entries))
    return found


def _follow(
    programs: Sequence[Path], names: Iterable[str], search: Sequence[Path]
) -> tuple[Imports, PathChanges]:
    """Return the modules that are found along ``search``, and the folders that they add to the path."""
    found, added = Imports(), PathChanges()
    queue = [Module("", program, program.parent) for program in programs]
    for name in names:
        queue += _find(name, search)
    while queue:
        module = queue.pop()
        if module.file in found.modules:
            continue
        found.modules[module.file] = module
        tree = _parsed(module.file, module.file.stat().st_mtime_ns) if module.file.suffix == ".py" else None
        if tree is None:
            continue
        for name in _imported(module, tree, found):
            queue += _find(name, search)
        if absent := [name for name in _certain(tree) if not _is_known(name, search)]:
            found.absent[module.file] = absent
        of_module = changes(tree, module.file, Path.cwd())
        added.first += of_module.first
        added.last += of_module.last
        if of_module.computed:
            found.unclear[module.file] = of_module.computed
    return found, added


def _usable(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that exist and are not of the environment, each once."""
    return list(dict.fromkeys(one for one in folders if one.is_dir() and not is_installed(one)))


def is_installed(folder: Path) -> bool:
    """Return whether a folder belongs to the environment and not to the user's project."""
    return any(folder.is_relative_to(place) for place in _environment()) or bool(
        {"site-packages", "dist-packages"} & set(folder.parts)
    )


@cache
def _environment() -> tuple[Path, ...]:
    places = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple(Path(place).resolve() for place in places)


def _find(name: str, search: Sequence[Path]) -> list[Module]:
    """Return the files of a dotted name: each package on the way, and the module."""
    top, *below = name.split(".")
    if top == _LIBRARY or top in sys.builtin_module_names:
        return []
    for entry in search:
        first = _file(entry / top)
        if first is not None:
            return [] if is_installed(entry) else _chain(top, below, first, entry)
    for entry in search:  # a package without __init__.py counts only if there is no other of this name
        if (entry / top).is_dir() and not is_installed(entry):
            return _chain(top, below, None, entry)
    return _by_hook(top, below)


def _by_hook(top: str, below: list[str]) -> list[Module]:
    """Return the files of a package that an editable installation finds without the module path."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None or spec.origin is None or not (file := Path(spec.origin)).is_file():
        return []
    entry = (file.parent.parent if file.stem == "__init__" else file.parent).resolve()
    return [] if is_installed(entry) else _chain(top, below, file.resolve(), entry)


def _chain(top: str, below: list[str], first: Path | None, entry: Path) -> list[Module]:
    found = [] if first is None else [Module(top, first, entry)]
    folder, name = entry / top, top
    for part in below:
        file, name = _file(folder / part), f"{name}.{part}"
        if file is None and not (folder / part).is_dir():
            break  # an attribute of the module
        found += [] if file is None else [Module(name, file, entry)]
        folder /= part
    return found


def _file(stem: Path) -> Path | None:
    """Return the file of a module or a package, None if there is none."""
    if (stem / "__init__.py").is_file():
        return stem / "__init__.py"
    return next((file for suffix in _SUFFIXES if (file := Path(f"{stem}{suffix}")).is_file()), None)


@cache
def _parsed(file: Path, changed: int) -> ast.Module | None:
    """Return the syntax tree of a file, last changed at ``changed``; None if it is not Python."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None  # the program itself reports it


def _certain(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the packages and modules that a module imports whenever it runs."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _is_known(top: str, search: Sequence[Path]) -> bool:
    if top in sys.stdlib_module_names or top in sys.builtin_module_names or top in sys.modules:
        return True
    if any(_file(entry / top) is not None or (entry / top).is_dir() for entry in search):
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _imported(module: Module, tree: ast.Module, found: Imports) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names if alias.name != "*")
            if base:
                yield base
        elif isinstance(node, ast.Call) and _imports(node.func):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield f"{module.package}{first.value}" if first.value.startswith(".") else first.value
            else:
                found.computed = True


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _imports(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")

"""The copy of the user's code that a job runs from, so that a later edit does not change a job in the queue.

    <folder of the job>/code/0/<project>/...

It holds the modules that the job imports, the packages that they are in, and the small files beside them.
Everything else beside them (data, outputs, ignored files) is a link to the original, so that paths relative
to ``__file__`` still work. What git ignores is linked too, apart from imported modules. The working directory
stays the user's. The contents that *count* are part of the job's identity: an edited helper is another job, a
new log file is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.provenance import git_answer
from dlo_lib.base.text import tr
from dlo_lib.cluster.code import library, module_redirect
from dlo_lib.cluster.code.imports import Imports, follow, is_installed

SMALL, LIMIT, ENTRIES = 2**20, 32 * 2**20, 1000
"""Bytes of a file that is copied although it is no module; bytes of a copy; entries of one of its folders."""

_START = "start"  # beside the numbered projects
_NEVER = {".git", ".hg", "__pycache__", ".ipynb_checkpoints"}
_PROSE = {".ipynb", ".md", ".rst", ".log", ".out", ".err", ".pdf", ".png", ".jpg", ".svg", ".html"}
_PROGRAMS = {".py", ".sh", ".bash", ".sbatch"}
_SETTINGS = {".toml", ".yaml", ".yml", ".ini", ".cfg"}


@dataclass(frozen=True)
class CodeCopy:
    """The code of one job, read once: what is counted is what is written.

    Attributes:
        roots: folders of the projects.
        files: contents by original path.
        counted: those that identify the job.
        entries: folders of the module path, originals.
        added: those that the code itself adds to the module path.
        notes: lines about imports that cannot be followed.
    """

    roots: tuple[Path, ...] = ()
    files: dict[Path, bytes] = field(default_factory=dict)
    counted: frozenset[Path] = frozenset()
    entries: tuple[Path, ...] = ()
    added: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def sources(self) -> list[bytes]:
        """Return the contents of the programs and modules that identify the code."""
        return [self.files[file] for file in sorted(self.counted) if file.suffix in _PROGRAMS]

    def content(self) -> list[tuple[str, bytes]]:
        """Return what identifies the code: names relative to the project, and contents."""
        named = {str(self._relative(file)): self.files[file] for file in self.counted}
        return sorted(named.items())

    def placed(self, original: Path, folder: Path) -> Path:
        """Return where a file or folder of the project lies in the copy below ``folder``."""
        return folder / "code" / self._relative(original)

    def path(self, folder: Path) -> list[str]:
        """Return the folders of the copy for the module path."""
        start = [str(folder / "code" / _START)] if self.added else []
        return start + [str(self.placed(entry, folder)) for entry in self.entries]

    def write(self, folder: Path) -> None:
        """Write the copy below ``folder``."""
        inside = {parent for file in self.files for parent in self._folders(file)}
        for file, content in self.files.items():
            target = self.placed(file, folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            if os.access(file, os.X_OK):
                target.chmod(target.stat().st_mode | 0o100)
        for original in sorted(inside):
            for entry in os.scandir(original):
                path = Path(entry.path)
                if entry.name not in _NEVER and path not in self.files and path not in inside:
                    target = self.placed(path, folder)
                    if not target.is_symlink():
                        target.symlink_to(self._beside(path, folder))
        if self.added:
            copies = {str(entry): str(self.placed(entry, folder)) for entry in self.entries}
            start = folder / "code" / _START / "sitecustomize.py"
            start.parent.mkdir(exist_ok=True)
            start.write_text(module_redirect.text(copies), encoding="utf-8")

    def _beside(self, path: Path, folder: Path) -> Path:
        """Return what stands in the copy for a path that is not copied: the original, or for the library the
        copy of it that the job runs."""
        ours = library.place_of(folder) / library.ROOT.name
        return ours if path.resolve() == library.ROOT and ours.exists() else path

    def _relative(self, original: Path) -> Path:
        number, root = next(
            (number, root) for number, root in enumerate(self.roots) if original.is_relative_to(root)
        )
        return Path(str(number), root.name or "root", original.relative_to(root))

    def _folders(self, file: Path) -> Iterable[Path]:
        """Return the folders from that of a file up to its root."""
        root = next(root for root in self.roots if file.is_relative_to(root))
        return (parent for parent in file.parents if parent.is_relative_to(root))


def copy_of(programs: Sequence[Path], names: Iterable[str] = (), beside: bool = True) -> CodeCopy:
    """Read the code that programs and named modules use; empty if none of it belongs to a project.

    Args:
        programs: files that the job runs, scripts of other languages included.
        names: names of modules.
        beside: also the modules and small files beside them; without, no limit applies.

    Raises:
        UserError: the code is larger than ``LIMIT``, or a folder has too many entries.
    """
    own = [file for program in programs if not is_installed((file := program.resolve()).parent)]
    imports = follow(own, names)
    if not imports.modules:
        return CodeCopy()
    listed = {root: _listed(root) for root in _roots(imports)}
    roots = tuple(listed)
    tracked = {file for of_root in listed.values() if of_root for file, known in of_root.items() if known}
    seen = {file for of_root in listed.values() if of_root for file in of_root}
    modules = set(imports.modules)
    chosen = set(modules)
    for folder in _code_folders(imports) if beside else ():
        in_git = next((listed[root] for root in roots if folder.is_relative_to(root)), None) is not None
        chosen |= {file for file in _small_files(folder) if not in_git or file in seen}
    counted = set(modules)
    for file in chosen - modules:
        if file.suffix == ".py":
            counted |= {file} if imports.computed else set()
        elif file.suffix in _SETTINGS or (file in tracked and file.suffix.lower() not in _PROSE):
            counted.add(file)
    added = tuple(entry for entry in imports.entries if entry in imports.added)
    entries, notes = tuple(imports.entries), tuple(imports.notes())
    return CodeCopy(roots, _read(chosen, beside), frozenset(counted), entries, added, notes)


def _roots(imports: Imports) -> list[Path]:
    """Return the outermost folders of the projects: git's, or the folders of the module path."""
    found = sorted({_toplevel(entry) or entry for entry in imports.entries})
    return [root for root in found if not any(root.is_relative_to(other) for other in found if other != root)]


def _code_folders(imports: Imports) -> set[Path]:
    """Return the folders of programs and modules, and the folders of code in their packages."""
    found = {module.file.parent for module in imports.modules.values()}
    packages = {module.entry / module.name.partition(".")[0] for module in imports.modules.values()}
    for package in packages:
        if (package / "__init__.py").is_file():
            found.update(_folders_with_code(package))
    return found


def _folders_with_code(folder: Path) -> Iterable[Path]:
    entries = [entry for entry in os.scandir(folder) if entry.name[0] != "." and entry.name not in _NEVER]
    if any(entry.name.endswith(".py") for entry in entries):
        yield folder
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _folders_with_code(Path(entry.path))


def _small_files(folder: Path) -> Iterable[Path]:
    """Return the modules and small files of a folder."""
    entries = [entry for entry in os.scandir(folder) if entry.name not in _NEVER]
    if len(entries) > ENTRIES:
        text = (
            "{folder} has {count} entries beside the code of the job, more than {limit}: "
            "keep code and data in separate folders, or use copy_code=False"
        )
        raise UserError(tr(text, folder=folder, count=len(entries), limit=ENTRIES))
    for entry in entries:
        if entry.is_file() and not entry.name.startswith("."):
            file = Path(entry.path)
            if file.suffix in (".py", ".so", ".pyd") or entry.stat().st_size <= SMALL:
                yield file


def _read(files: set[Path], limited: bool) -> dict[Path, bytes]:
    sizes = {file: file.stat().st_size for file in files}
    if (whole := sum(sizes.values())) > LIMIT and limited:
        largest = max(sizes, key=lambda file: sizes[file])
        text = (
            "the code of the job has {size} MiB, more than {limit}: keep large files such as {largest} in "
            "another folder, or use copy_code=False"
        )
        raise UserError(tr(text, size=whole // 2**20, limit=LIMIT // 2**20, largest=largest))
    return {file: file.read_bytes() for file in sorted(files)}


def _toplevel(folder: Path) -> Path | None:
    said = git_answer(folder, "rev-parse", "--show-toplevel")
    return None if said is None else Path(said.strip()).resolve()


def _listed(root: Path) -> dict[Path, bool] | None:
    """Return the files of a repository that git does not ignore, and whether it tracks them; else None."""
    tracked = git_answer(root, "ls-files", "-z", "--cached")
    others = git_answer(root, "ls-files", "-z", "--others", "--exclude-standard")
    if tracked is None or others is None:
        return None
    found = {root / name: False for name in others.split("\0") if name}
    return found | {root / name: True for name in tracked.split("\0") if name}

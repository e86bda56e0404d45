"""Code of a submission that ``dlo similar`` cannot compare: text that is run, compiled files, endless cells.

Each finding is a reason for a person to read the submission, not a proof. Code in a string that can be read
is compared (:func:`~dlo_lib.grading.classroom.similar.fingerprints.strings`); here are the ways to run what
cannot.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.roster.safe_files import Refused, printable, read_regular
from dlo_lib.grading.classroom.similar.fingerprints import is_read_whole
from dlo_lib.grading.lab.syntax import LINE_OF_IPYTHON, MAX_PARSED, parsed

RUNS = frozenset(
    (
        "exec",
        "marshal",
        "CodeType",
        "FunctionType",
        "run_cell",
        "run_line_magic",
        "__subclasses__",
        "__globals__",
    )
)  # as a name or an attribute
BARE = frozenset(("eval", "compile", "__import__", "__builtins__"))  # as a name: model.eval() is another
ENCODED = re.compile(r"[^\s\"']{400,}")  # such as base64
CODE_FILES = (".py", ".pyi", ".pyx", ".ipy", ".txt", ".cu", ".cpp", ".cc", ".c", ".h", ".hpp", ".pth")
COMPILED_FILES = (".pyc", ".so", ".pyd", ".zip", ".egg", ".whl")  # Python imports from them
LEFT_BY_TOOLS = ("__pycache__", ".ipynb_checkpoints", "feedback")
MOST_FILES, MOST_BYTES = 200, 1 << 20  # of one submission, of one file


def reasons(text: str) -> list[str]:
    """Return what a cell or a file does that hides code, in words; empty for almost every honest one."""
    found = []
    tree = parsed(LINE_OF_IPYTHON.sub("", text))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    attributes |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if called := sorted((RUNS & (names | attributes)) | (BARE & names)):
        found.append(tr("runs code from text ({names})", names=", ".join(called)))
    if any(_is_pieced(node) for node in ast.walk(tree)):
        found.append(tr("looks up a name that it puts together from pieces"))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if any(isinstance(value, str | bytes) and ENCODED.search(_text(value)) for value in constants):
        found.append(tr("has a long text without spaces, which may be encoded code"))
    if len(text) > MAX_PARSED or not is_read_whole(text):
        found.append(tr("is too long to be read as a whole"))
    return found


def code_files(folder: Path, released: dict[str, bytes]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the text of each file of a submission that holds code, and why another cannot be compared.

    Args:
        folder: with the notebook; files that equal a released one are left out.
        released: path below the folder → content.
    """
    texts: dict[str, str] = {}
    unread: dict[str, str] = {}
    for number, file in enumerate(_files(folder)):
        name = file.relative_to(folder).as_posix()
        shown = printable(name)
        if number >= MOST_FILES:
            unread[tr("other files")] = tr("are more than {number}: not compared", number=MOST_FILES)
            break
        if file.suffix.lower() in COMPILED_FILES:
            unread[shown] = tr("is compiled or packed code, which Python can import")
        elif file.suffix.lower() in CODE_FILES:
            try:
                content = read_regular(file, MOST_BYTES)
            except Refused as error:
                unread[shown] = str(error)
                continue
            if content != released.get(name):
                texts[shown] = content.decode("utf-8", "replace")
    return texts, unread


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files with code below ``folder``, the nearest first."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in (*CODE_FILES, *COMPILED_FILES))
    own = (file for file in found if not set(file.relative_to(folder).parts[:-1]) & set(LEFT_BY_TOOLS))
    written = ("timestamp.txt", "submission_secret.txt")  # by nbgrader
    yield from sorted(
        (file for file in own if file.name not in written),
        key=lambda file: (len(file.parts), file.as_posix()),
    )


def _is_pieced(node: ast.AST) -> bool:
    """Return True for ``x['ex' + 'ec']`` and ``getattr(x, 'ex' + 'ec')``."""
    if isinstance(node, ast.Subscript):
        key: ast.AST | None = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        key = node.args[1] if len(node.args) > 1 else None
    else:
        return False
    if not isinstance(key, ast.BinOp):
        return False
    leaves = [leaf for leaf in ast.walk(key) if isinstance(leaf, ast.Constant | ast.Name | ast.Call)]
    return all(isinstance(leaf, ast.Constant) and isinstance(leaf.value, str) for leaf in leaves)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")

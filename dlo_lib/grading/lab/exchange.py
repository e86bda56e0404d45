"""The exchange through which a student fetches and submits labs, and whether a class has one.

An ``nbgrader_config`` of the user or of the site names it, or ``dlo lab --exchange FOLDER``. Without one, a
private exchange in the state folder is used: submissions then stay on the machine, and the student works
alone.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

from jupyter_core.paths import jupyter_config_path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir

_ROOT = re.compile(r"^\s*c\.Exchange\.root\s*=\s*(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class ClassExchange:
    """Where nbgrader's extensions fetch and submit labs.

    Attributes:
        folder: the folder, or None if the file ``source`` sets it.
        source: the nbgrader configuration of the user or of the site that sets it; None for the option
            ``--exchange`` and for the private exchange.
    """

    folder: Path | None
    source: Path | None = None

    def __str__(self) -> str:
        if self.source is not None:
            return f"Labs are fetched and submitted through the exchange that {self.source} sets."
        if self.folder == state_dir() / "exchange":
            return (
                f"Submissions stay on this machine, in {self.folder}, because no nbgrader_config.py sets the "
                "exchange of a class: dlo lab --exchange FOLDER sets it."
            )
        return f"Labs are fetched and submitted through the exchange {self.folder}."


def find_exchange(asked: Path | None = None) -> ClassExchange:
    """Return ``asked``, or the exchange of the user's or the site's configuration, or a private one.

    Raises:
        UserError: ``asked`` is no folder.
    """
    if asked is not None:
        folder = asked.expanduser().resolve()
        if not folder.is_dir():
            raise UserError(f"no folder {folder}: --exchange takes the folder that your class shares")
        return ClassExchange(folder)
    own = state_dir() / "jupyter"
    for place in jupyter_config_path():
        for name in ("nbgrader_config.py", "nbgrader_config.json"):
            file = Path(place) / name
            if file.parent != own and file.is_file() and _sets_exchange(file):
                return ClassExchange(None, file)
    return ClassExchange(state_dir() / "exchange")


def has_class() -> bool:
    """Return whether ``dlo submit`` hands in to the exchange of a class, and not to the private one.

    An exchange that a configuration file names in a form that cannot be read counts as one of a class.
    """
    if find_exchange().source is not None:
        return True
    private = state_dir() / "exchange"
    own = state_dir() / "jupyter" / "nbgrader_config.py"
    if not own.is_file():  # `dlo submit` then writes it, with the private exchange
        return False
    set_to = _ROOT.findall(own.read_text(encoding="utf-8", errors="replace"))
    return bool(set_to) and _path(set_to[-1]) != private


def _path(text: str) -> Path | None:
    try:
        return Path(str(ast.literal_eval(text)))
    except (ValueError, SyntaxError):
        return None


def _sets_exchange(file: Path) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".py":
        return _ROOT.search(text) is not None
    try:
        return "root" in json.loads(text)["Exchange"]
    except (ValueError, TypeError, KeyError):
        return False

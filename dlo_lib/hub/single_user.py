"""The server of a user: ``python -m dlo_lib.hub.single_user``, JupyterHub's without the Hub's database.

``jupyterhub.singleuser`` shares modules with the Hub (its log, scopes and metrics). They import the Hub's
database and its pages, which a user's server never uses: 32 MB for each student. The names that they import
are empty here. A function that uses one fails, because a query needs the database.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import types
from typing import Any

ABSENT = (
    "sqlalchemy",
    "sqlalchemy.exc",
    "jupyterhub.orm",
    "jupyterhub.handlers",
    "jupyterhub.handlers.pages",
)


class _Absent(types.ModuleType):
    """A module whose names are classes that nothing is an instance of."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Exception,), {"__module__": self.__name__})  # `except SQLAlchemyError` needs one
        setattr(self, name, value)
        return value


def import_singleuser() -> types.ModuleType:
    """Import ``jupyterhub.singleuser`` without the modules in :data:`ABSENT`, or with them if it needs them.

    Later imports of these modules are real; nbgrader's Course List makes them.
    """
    name = "jupyterhub.singleuser"
    sys.modules.update({absent: _Absent(absent) for absent in ABSENT if absent not in sys.modules})
    try:
        module = importlib.import_module(name)
    except (ImportError, AttributeError, TypeError):  # another version of JupyterHub
        for imported in [one for one in sys.modules if one.partition(".")[0] == "jupyterhub"]:
            del sys.modules[imported]
        _remove_absent()
        return importlib.import_module(name)
    _remove_absent()
    return module


def _remove_absent() -> None:
    for name in ABSENT:
        if isinstance(sys.modules.get(name), _Absent):
            del sys.modules[name]


def main() -> None:
    """Serve a user until the server is stopped.

    The Hub stops a server by SIGINT, for which Python raises KeyboardInterrupt wherever it is. In a place
    that ignores exceptions, such as a finaliser, it is lost, and the Hub waits for 30 s. The handler of
    SIGTERM stops Jupyter's loop, so SIGINT becomes SIGTERM.
    """
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    import_singleuser().main()


if __name__ == "__main__":
    main()

"""The server of a user does not import the Hub's database, and works with a JupyterHub that needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.class_on_hub import ClassOnHub

IMPORT = """
import json, sys
from dlo_lib.hub.single_user import ABSENT, import_singleuser
module = import_singleuser()
import sqlalchemy
print(json.dumps([module.main(), sqlalchemy.__file__, "jupyterhub.orm" in sys.modules]))
"""
MODULES = {
    "sqlalchemy/__init__.py": "",
    "sqlalchemy/exc.py": "class SQLAlchemyError(Exception): pass",
    "jupyterhub/__init__.py": "",
    "jupyterhub/orm.py": "import sqlalchemy\nclass User: pass",
    "jupyterhub/handlers/__init__.py": "from .. import orm",
    "jupyterhub/handlers/pages.py": "class HealthCheckHandler: pass",
    "jupyterhub/scopes.py": "from . import orm\ndef is_user(one): return isinstance(one, orm.User)",
    "jupyterhub/utils.py": """
from sqlalchemy.exc import SQLAlchemyError
from .handlers.pages import HealthCheckHandler
def fails():
    try:
        raise OSError
    except SQLAlchemyError:
        return "of the database"
    except OSError:
        return "of the system"
""",
    "jupyterhub/singleuser.py": """
from .scopes import is_user
from .utils import fails, HealthCheckHandler
def main(): return [fails(), is_user(3), isinstance(3, HealthCheckHandler)]
""",
}


def imported(folder: Path) -> list:
    """Import the packages of ``folder`` as a server does; return what its ``main`` does and what is there."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{IMPORT}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


INTERRUPTED = """
import os, signal, sys
class Kept:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
def main():
    stops = []  # as Jupyter's handler, which stops the loop
    signal.signal(signal.SIGTERM, lambda *_: stops.append(True))
    Kept()
    sys.exit(7 if stops else 0)
"""


def test_an_interrupt_in_a_finaliser_stops_the_server(packages: Path) -> None:
    """Python ignores the KeyboardInterrupt there."""
    (packages / "jupyterhub" / "singleuser.py").write_text(INTERRUPTED)
    code = (
        f"import sys; sys.path.insert(0, {str(packages)!r})\nfrom dlo_lib.hub.single_user import main; main()"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_database_is_absent_in_a_server_and_present_for_later_imports(packages: Path) -> None:
    result, real, database = imported(packages)
    assert result == ["of the system", False, False]
    assert real == str(packages / "sqlalchemy" / "__init__.py")
    assert not database


@pytest.mark.parametrize("line", ["from .orm import User as U; U.__table__", "import sqlalchemy.pool"])
def test_a_jupyterhub_that_needs_the_database_has_it(packages: Path, line: str) -> None:
    (packages / "sqlalchemy" / "pool.py").write_text("")
    (packages / "jupyterhub" / "orm.py").write_text("class User: __table__ = 3")
    server = packages / "jupyterhub" / "singleuser.py"
    server.write_text(f"{line}\n{server.read_text()}")
    result, _, database = imported(packages)
    assert result == ["of the system", False, False]
    assert database


def test_the_server_of_a_student_holds_no_database_and_no_nbgrader(hub: ClassOnHub) -> None:
    ada = hub.person("ada")
    code = (
        "import sys; from dlo_lib.hub.single_user import import_singleuser; import_singleuser()\n"
        "import dlo_lib.hub.assignment_list\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = hub.run_as(ada, str(hub.environment / "bin" / "python"), "-c", code)
    assert done.returncode == 0, done.stderr
    assert "jupyterhub" in done.stdout
    for name in ("sqlalchemy", "alembic", "nbgrader", "nbconvert", "torch"):
        assert f"'{name}'" not in done.stdout

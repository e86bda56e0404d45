"""The oldest supported PyTorch: one number in three places, and one line for anything older."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_version import OLDEST, check_torch, cure, release
from dlo_lib.launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TOO_OLD = f"PyTorch 2.7.1+cu126 is too old, the oldest supported release is 2.8: {cure()}"


def test_the_oldest_release_is_that_of_pyproject():
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.8.0+cu128", (2, 8)), ("2.10.0a0+git1234", (2, 10)), ("2.13", (2, 13))]
)
def test_a_version_is_read_with_any_suffix(version, numbers):
    assert release(version) == numbers
    check_torch(version)


def test_an_upgrade_is_advised_only_where_pytorch_belongs_to_the_environment(monkeypatch, tmp_path):
    """``pip install -U torch`` on the module of a computing centre breaks it."""
    package = tmp_path / "lib" / "torch"
    package.mkdir(parents=True)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda _: SimpleNamespace(origin=str(package / "__init__.py"))
    )
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert cure() == "pip install -U torch"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "pip" not in cure(), "another user's environment"
    monkeypatch.undo()
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda _: SimpleNamespace(origin=str(package / "__init__.py"))
    )
    assert "pip" not in cure(), "a virtual environment on a module"
    assert "make lab" in cure()


def test_ranks_are_not_started_on_an_older_one(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.7.1+cu126")
    with pytest.raises(UserError) as raised:
        run_ranks(len, 2, "ab")
    assert str(raised.value) == TOO_OLD


@pytest.mark.parametrize(
    ("program", "module"),
    [("dlo", "from dlo_lib.cli import main"), ("dlo_lib.train", "import runpy\nmain = lambda: train()")],
)
def test_commands_report_it_in_one_line(program, module):
    code = (
        "import importlib.metadata, runpy, sys\n"
        "version = importlib.metadata.version\n"
        "importlib.metadata.version = lambda name: '2.7.1+cu126' if name == 'torch' else version(name)\n"
        "train = lambda: runpy.run_module('dlo_lib.train', run_name='__main__')\n"
        f"sys.argv[1:] = []\n{module}\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{program}: {TOO_OLD}\n")

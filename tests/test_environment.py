"""The three files that list the packages agree: pyproject.toml, constraints.txt, environment.yml.

The set-up.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# PyTorch determines the version of Triton, the only package of the extra `kernels`.
EXTRAS = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name != "kernels"}
GROUPS = [PROJECT["dependencies"], *EXTRAS.values()]
NEEDS = [Requirement(text) for group in GROUPS for text in group]

OF_HUB = {str(Requirement(text)) for text in EXTRAS["hub"]}
"""Installed by `make hub` and where deploy/hub/README.md says, not in .venv."""


def pins() -> dict[str, Version]:
    lines = (
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    return {normal(name): Version(version) for name, version in (line.split("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def conda_file() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.name)
def test_every_requirement_is_pinned_at_a_version_it_allows(need):
    assert need.specifier.contains(pins()[normal(need.name)], prereleases=True)


def test_conda_installs_what_pyproject_asks_for():
    (from_pip,) = (entry["pip"] for entry in conda_file()["dependencies"] if isinstance(entry, dict))
    assert from_pip[0] == "-c constraints.txt"
    wanted = sorted(str(need) for need in NEEDS if str(need) not in OF_HUB)
    assert sorted(str(Requirement(text)) for text in from_pip[1:]) == wanted


def test_make_kernels_installs_a_triton_that_the_extra_allows():
    (need,) = map(Requirement, PROJECT["optional-dependencies"]["kernels"])
    text = (ROOT / "deploy" / "kernels.py").read_text(encoding="utf-8")
    (installed,) = re.findall(r'^TRITON = "([\d.]+)"$', text, re.MULTILINE)
    assert need.name == "triton"
    assert need.specifier.contains(installed)
    assert "triton" not in pins()  # it would contradict the version that a CUDA build of PyTorch requires


def test_conda_has_the_python_of_pyproject():
    (python,) = (
        entry
        for entry in conda_file()["dependencies"]
        if isinstance(entry, str) and entry.startswith("python")
    )
    assert Requirement(python).specifier == Requirement(f"python{PROJECT['requires-python']}").specifier


def test_what_is_installed_here_is_what_is_pinned():
    from importlib.metadata import version

    wrong = {
        need.name: version(need.name)
        for need in NEEDS
        if str(need) not in OF_HUB
        and Version(Version(version(need.name)).public) != pins()[normal(need.name)]
    }
    assert not wrong, "run `make test`, which brings .venv up to date"


SETUP = ROOT / "deploy" / "setup_env.py"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """deploy/setup_env.py, for a checkout without .venv."""
    spec = importlib.util.spec_from_file_location("setup_env", SETUP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("TORCH", "TORCH_INDEX", "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / ".made-from")
    return module


def test_setup_runs_on_python_3_6():
    tree = ast.parse(SETUP.read_text(encoding="utf-8"), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {
        name
        for name in sys.stdlib_module_names
        if name not in ("tomllib", "dataclasses", "graphlib", "zoneinfo")
    }


def said_by_setup(setup_file: Path = SETUP, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(setup_file)],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.strip()


def test_setup_names_the_cure_for_a_wrong_torch():
    assert (
        said_by_setup(TORCH="tpu")
        == 'setup: TORCH is "tpu": use auto, cpu, cuda, here, or a build such as cu128'
    )


def test_a_folder_whose_name_the_locale_cannot_read_is_refused_with_the_cure(tmp_path):
    (tmp_path / "été" / "deploy").mkdir(parents=True)
    copy = shutil.copy(SETUP, tmp_path / "été" / "deploy")
    said = said_by_setup(Path(copy), LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert said.startswith("setup: the locale of this shell cannot read the name of the folder /")
    assert said.endswith(": export LC_ALL=C.UTF-8")


@pytest.mark.parametrize(
    ("system", "says"),
    [("Darwin", "this is Darwin: open this folder in its container"), ("Windows", "or use WSL2")],
)
def test_on_another_system_than_linux_the_cure_is_named(setup, monkeypatch, capsys, system, says):
    monkeypatch.setattr(setup.platform, "system", lambda: system)
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert setup.main() == 2
    assert says in capsys.readouterr().err


def test_setup_names_the_cure_for_a_wrong_python(setup, monkeypatch):
    monkeypatch.setenv("PYTHON", "/bin/false")
    with pytest.raises(setup.SetupError, match=r"PYTHON=/bin/false is no Python: use Python 3\.11 to 3\.14$"):
        setup.find_python()


def test_a_python_that_is_too_new_is_refused(setup, monkeypatch, tmp_path):
    too_new = interpreter(tmp_path / "python3.15", "3 15")
    monkeypatch.setenv("PYTHON", too_new)
    with pytest.raises(setup.SetupError, match=r"python3\.15 is 3\.15: use Python 3\.11 to 3\.14$"):
        setup.find_python()


def test_the_newest_supported_python_is_found_beside_one_that_is_too_new(setup, monkeypatch, tmp_path):
    for name, version in {"python3": "3 15", "python3.14": "3 14", "python3.11": "3 11"}.items():
        interpreter(tmp_path / name, version)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.find_python() == str(tmp_path / "python3.14")


def test_the_set_up_builds_on_the_pythons_of_pyproject(setup):
    required = Requirement(f"python{PROJECT['requires-python']}").specifier
    versions = [(3, minor) for minor in range(30) if required.contains(f"3.{minor}")]
    assert sorted(setup.SUPPORTED) == versions
    assert Requirement(f"python{setup.SUPPORTED_RANGE}").specifier == required


def interpreter(path: Path, version: str) -> str:
    """Write a program that prints this version, as "major minor"."""
    path.write_text(f"#!/bin/sh\necho {version}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_torch_here_needs_a_torch(setup, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1\n", encoding="utf-8"
    )
    bare.chmod(0o755)
    with pytest.raises(
        setup.SetupError, match="has no PyTorch .*load its module or activate its environment first"
    ):
        setup.torch_folder(str(bare))
    bare.write_text("#!/bin/sh\necho 2.1.2+cu121 /somewhere/torch\n", encoding="utf-8")
    with pytest.raises(setup.SetupError, match=r"has PyTorch 2\.1\.2\+cu121: use 2\.\d+ or newer"):
        setup.torch_folder(str(bare))


def test_an_old_torch_is_refused_at_the_same_version_everywhere(setup):
    (need,) = (need for need in NEEDS if need.name == "torch")
    assert need.specifier.contains(".".join(map(str, setup.OLDEST_TORCH)))
    assert not need.specifier.contains(f"{setup.OLDEST_TORCH[0]}.{setup.OLDEST_TORCH[1] - 1}")


def test_uv_gets_the_indexes_of_pip(setup):
    pip = {
        "index-url": "https://a.example/simple",
        "extra-index-url": "\nfile:///b\nfile:///c",
        "find-links": "/d /e",
        "no-cache-dir": "1",
    }
    expected = {
        "UV_DEFAULT_INDEX": "https://a.example/simple",
        "UV_INDEX": "file:///b file:///c",
        "UV_FIND_LINKS": "/d,/e",
    }
    assert setup.from_pip(pip) == expected


def test_pips_settings_are_read_and_its_environment_overrides_them(setup, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///from/the/environment")
    assert setup.pip_settings()["extra-index-url"] == "file:///from/the/environment"


def test_the_user_s_own_settings_of_uv_stay(setup, monkeypatch):
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///of/pip")
    monkeypatch.setenv("UV_INDEX", "file:///of/uv")
    assert setup.uv_settings()["UV_INDEX"] == "file:///of/uv"


LOCK = """\
lock-version = "1.0"

[[packages]]
name = "torch"
version = "2.13.0+cpu"
sdist = { url = "https://a.example/torch.tar.gz", size = 7 }
wheels = [{ url = "https://a.example/torch.whl", size = 1000, hashes = {} }]

[[packages]]
name = "local"
version = "1"
wheels = [{ url = "file://{folder}/local.whl", hashes = {} }]
"""


def test_the_size_of_the_download_is_that_of_the_wheels(setup, tmp_path):
    (tmp_path / "local.whl").write_bytes(b"x" * 24)
    lock = tmp_path / "pylock.toml"
    lock.write_text(LOCK.replace("{folder}", str(tmp_path)), encoding="utf-8")
    assert setup.what_comes(lock) == ("2.13.0 (CPU build)", 1024, 2)
    lock.write_text(
        lock.read_text(encoding="utf-8") + '\n[[packages]]\nname = "nvidia-nccl-cu13"\nversion = "2"\n',
        encoding="utf-8",
    )
    assert setup.what_comes(lock)[0] == "2.13.0 (CUDA build)"


def test_too_little_space_is_reported_before_the_download(setup, monkeypatch):
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: SimpleNamespace(free=3e9))
    with pytest.raises(setup.SetupError, match=r"3\.0 GB are free on the disk of .*, and 8\.4 GB are needed"):
        setup.announce("PyTorch", 3.1, 200)


def test_an_environment_is_ready_only_for_its_extras_and_choice(setup, monkeypatch):
    setup.PYTHON.parent.mkdir(parents=True)
    setup.PYTHON.symlink_to(sys.executable)
    assert not setup.is_ready("labs")
    stamp = {"torch": "here", "python": sys.executable, "made from": setup.fingerprint("labs", "here")}
    setup.STAMP.write_text(json.dumps(stamp), encoding="utf-8")
    assert setup.is_ready("labs")
    assert not setup.is_ready("labs,dev")
    monkeypatch.setenv("TORCH", "cpu")
    assert not setup.is_ready("labs")
    monkeypatch.delenv("TORCH")
    monkeypatch.setenv("PYTHON", sys.executable)
    assert setup.is_ready("labs")
    (setup.ROOT / "constraints.txt").write_text("torch==3.0\n", encoding="utf-8")
    assert not setup.is_ready("labs")


def test_jobs_load_the_modules_of_the_torch_they_were_set_up_on(setup, monkeypatch):
    activate = setup.VENV / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("# activate\n", encoding="utf-8")
    monkeypatch.setenv("LOADEDMODULES", "cuda/12.4:pytorch-gpu/py3/2.6.0")
    setup.load_modules_on_activation()
    setup.load_modules_on_activation()
    done = subprocess.run(
        ["bash", "-c", f'module() {{ echo "$@"; }}; . {activate}'], capture_output=True, text=True, check=True
    )
    assert done.stdout == "load cuda/12.4 pytorch-gpu/py3/2.6.0\n"


@pytest.fixture
def torch_here(setup, monkeypatch, tmp_path):
    """The set-up on a PyTorch whose metadata has these requirements."""
    packages = tmp_path / "packages"
    metadata = packages / "torch-2.11.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    needs = [
        "setuptools<82",
        "Typing_Extensions>=4.10",
        'numpy<2; extra == "old"',
        'sympy<1; python_version < "3"',
    ]
    lines = [f"Requires-Dist: {need}" for need in needs]
    metadata.write_text("\n".join(["Metadata-Version: 2.1", "Name: torch", "Version: 2.11.0", *lines, ""]))
    run = setup.run

    def with_packages(command, environment=None, **options):
        return run(command, {**(environment or os.environ), "PYTHONPATH": str(packages)}, **options)

    monkeypatch.setattr(setup, "run", with_packages)
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    setup.VENV.mkdir(exist_ok=True)
    return setup


def test_torch_here_decides_which_pins_do_not_hold(torch_here, capsys):
    """2.11 to 2.12.1 require setuptools<82; the pin put 84.2.1 beside them without a word."""
    before = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    after = torch_here.constraints_for("here").read_text(encoding="utf-8").splitlines()
    assert set(before) - set(after) == {
        line for line in before if line.startswith(("torch==", "setuptools=="))
    }
    assert set(after) - set(before) == {"setuptools<82"}
    assert "requires setuptools<82, which replaces" in capsys.readouterr().out


def test_another_torch_is_installed_with_all_pins(torch_here):
    assert torch_here.constraints_for("cpu") == torch_here.ROOT / "constraints.txt"

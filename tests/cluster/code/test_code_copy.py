"""A job runs the submitted code: later edits do not reach it, and an edited helper is another job."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.base.errors import UserError
from dlo_lib.cluster.code import code_copy
from dlo_lib.cluster.code.code_copy import copy_of
from dlo_lib.cluster.slurm import commands

HELPER = "from deep.er import depth\ndef word():\n    return '{word}' + depth()\n"


def git(*words: str) -> None:
    subprocess.run(["git", *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program, a module and a helper that imports a package, in a folder on the module path; no SLURM."""
    folder = tmp_path / "project"
    (folder / "deep").mkdir(parents=True)
    (folder / "my_helper.py").write_text(HELPER.format(word="first"))
    (folder / "deep" / "__init__.py").write_text("")
    (folder / "deep" / "er.py").write_text("def depth():\n    return '!'\n")
    program = "import sys, pathlib, my_helper\nprint(my_helper.word(), *sys.argv[1:])\n"
    program += "print((pathlib.Path(__file__).parent / 'settings.toml').read_text())\n"
    (folder / "program.py").write_text(program)
    (folder / "settings.toml").write_text("a = 1")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("DLO_POLL_S", "0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("DLO_SITE", raising=False)
    monkeypatch.setattr(commands, "is_available", lambda: False)
    yield folder
    for name in ("my_helper", "deep", "deep.er", "program"):
        sys.modules.pop(name, None)


def in_a_notebook() -> Callable[[], str]:
    """Return the function as one of a notebook, which is sent as code."""
    scope: dict[str, object] = {"__name__": "__main__"}
    source = "def cell():\n    import my_helper\n    print(my_helper.word())\n"
    exec(compile(source, "cell", "exec"), scope)  # a cell is compiled in this way
    return scope["cell"]  # type: ignore[return-value]


KINDS: dict[str, Callable[[], object]] = {
    "program": lambda: "program.py",
    "module": lambda: "program",
    "command": lambda: [sys.executable, "program.py"],
    "function": in_a_notebook,
}


@pytest.mark.parametrize(("kind", "in_git"), [*((kind, False) for kind in KINDS), ("program", True)])
def test_an_edit_after_the_submission_does_not_change_the_job_and_makes_another(
    kind, in_git, project, capsys
):
    if in_git:
        git("init", "-q")
        git("add", "my_helper.py")
    hold = cluster.submit(["bash", "-c", "while [ ! -e go ]; do sleep 0.1; done"])
    job = cluster.submit(KINDS[kind](), after=hold)
    capsys.readouterr()
    assert cluster.submit(KINDS[kind](), after=hold).folder == job.folder
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"found job {job.name}, submitted 20")
    for file, old, new in (("my_helper.py", "first", "second"), ("deep/er.py", "!", "?")):
        Path(file).write_text(Path(file).read_text().replace(old, new))
        edited = cluster.submit(KINDS[kind](), after=hold)
        assert edited.folder != job.folder
        assert capsys.readouterr().out.splitlines()[-1] == f"submitted job {edited.name}"
    Path("go").touch()
    assert job.wait(timeout=600).logs().startswith("first!")
    assert edited.wait(timeout=600).logs().startswith("second?")


IDIOMS = {
    "append": 'import sys\nsys.path.append("src")',
    "insert": 'import sys\nsys.path.insert(0, "src")',
    "of this file": "import os, sys\nHERE = os.path.dirname(os.path.abspath(__file__))\n"
    'sys.path.insert(0, os.path.join(HERE, "src"))',
    "pathlib": "import sys\nfrom pathlib import Path\nROOT = Path(__file__).resolve().parents[0]\n"
    'sys.path += [str(ROOT / "src"), f"{ROOT}/lib"]',
    "slice": 'import sys\nsys.path[:0] = ["src"]',
    "sum": 'import os, sys\nsys.path = [os.getcwd() + "/src", *sys.path]',
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_folders_that_a_program_adds_to_the_module_path_are_followed(idiom, project):
    (project / "src").mkdir()
    for name in ("my_helper.py", "deep"):
        (project / name).rename(project / "src" / name)
    program = project / "program.py"
    program.write_text(f"{IDIOMS[idiom]}\n{program.read_text()}")
    found = copy_of([program])
    assert {"my_helper.py", "er.py"} <= {file.name for file in found.counted}
    assert (found.added, found.notes) == ((project / "src",), ())


def test_an_edit_below_an_added_folder_does_not_reach_the_job(project):
    """`sys.path.insert(0, "src")` comes before the copies in the module path."""
    (project / "src").mkdir()
    for name in ("my_helper.py", "deep"):
        (project / name).rename(project / "src" / name)
    text = (project / "program.py").read_text()
    (project / "program.py").write_text(f"{IDIOMS['insert']}\n{text}")
    hold = cluster.submit(["bash", "-c", "while [ ! -e go ]; do sleep 0.1; done"])
    job = cluster.submit("program.py", after=hold)
    helper = project / "src" / "my_helper.py"
    helper.write_text(helper.read_text().replace("first", "second"))
    edited = cluster.submit("program.py", after=hold)
    assert edited.folder != job.folder
    Path("go").touch()
    assert job.wait(timeout=600).logs().startswith("first!")
    assert edited.wait(timeout=600).logs().startswith("second!")


def test_a_sitecustomize_of_the_user_runs_as_well(project):
    from dlo_lib.cluster.code import module_redirect

    for folder, text in (("start", module_redirect.text({})), ("own", "import sys\nsys.mine = 7\n")):
        (project / folder).mkdir()
        (project / folder / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(project / "start"), str(project / "own")])
    shown = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.mine)"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "7\n", shown.stderr


def test_what_cannot_be_followed_is_reported_once(project, capsys):
    (project / "program.py").write_text(
        "import sys, no_such_module\nsys.path.append(sys.argv[1])\n"
        "try:\n    import an_optional_one\nexcept ImportError:\n    pass\n"
    )
    job = cluster.submit("program.py")
    said = capsys.readouterr().out
    assert "note: program.py, line 2, adds a computed folder to the module path: what it finds" in said
    assert "note: program.py imports no_such_module, which is not found here" in said
    assert "an_optional_one" not in said
    cluster.submit("program.py")
    assert "note:" not in capsys.readouterr().out
    job.cancel()


def test_files_beside_the_code_are_found_and_only_settings_count(project):
    (project / "data").mkdir()
    (project / "large.bin").write_bytes(b"x" * (code_copy.SMALL + 1))
    first = copy_of([project / "program.py"])
    (project / "results.json").write_text("{}")
    (project / "plot.py").write_text("")
    assert copy_of([project / "program.py"]).content() == first.content()
    (project / "settings.toml").write_text("a = 2")
    changed = copy_of([project / "program.py"])
    assert changed.content() != first.content()
    changed.write(project / "job")
    copy = changed.placed(project, project / "job")
    assert (copy / "settings.toml").read_text() == "a = 2"
    assert not (copy / "plot.py").is_symlink()
    assert os.readlink(copy / "large.bin") == str(project / "large.bin")
    assert os.readlink(copy / "data") == str(project / "data")
    assert [name for name, _ in changed.content()] == [
        f"0/project/{name}"
        for name in ("deep/__init__.py", "deep/er.py", "my_helper.py", "program.py", "settings.toml")
    ]


def test_git_decides_which_files_are_of_the_project(project):
    (project / ".gitignore").write_text("ignored.toml\nmade.py\n")
    for name in ("ignored.toml", "made.py", "tracked.txt", "untracked.txt", "notes.md"):
        (project / name).write_text("1")
    (project / "program.py").write_text("import made")  # it is imported, although git ignores it
    git("init", "-q")
    git("add", "tracked.txt", "notes.md", "program.py")
    found = copy_of([project / "program.py"])
    assert {file.name for file in found.files} >= {"made.py", "tracked.txt", "untracked.txt", "program.py"}
    assert {file.name for file in found.counted} == {"made.py", "program.py", "tracked.txt", "settings.toml"}
    found.write(project / "job")
    assert (found.placed(project, project / "job") / "ignored.toml").is_symlink()


def test_every_module_counts_if_an_import_is_computed(project):
    (project / "plugin.py").write_text("a = 1")
    assert not any("plugin" in name for name, _ in copy_of([project / "program.py"]).content())
    (project / "program.py").write_text("import importlib, sys\nimportlib.import_module(sys.argv[1])")
    assert any("plugin" in name for name, _ in copy_of([project / "program.py"]).content())


def test_relative_imports_and_namespace_packages_are_followed(project):
    (project / "space").mkdir()
    for name, text in (("a", "from . import b\nfrom .c import x"), ("b", ""), ("c", "x = 1"), ("d", "")):
        (project / "space" / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    names = [Path(name).name for name, _ in copy_of([], ["space.a"], beside=False).content()]
    assert names == ["a.py", "b.py", "c.py"]


def test_modules_of_the_environment_are_not_copied(project):
    assert copy_of([], ["torch", "json", "dlo_lib.train", "sys", "no_such_module"]).files == {}


def test_a_project_that_is_too_large_is_one_line(project, monkeypatch):
    monkeypatch.setattr(code_copy, "LIMIT", 2000)
    (project / "table.csv").write_bytes(b"x" * 3000)
    with pytest.raises(
        UserError, match=r"the code of the job has .* keep large files such as .*table.csv in"
    ):
        cluster.submit("program.py")
    job = cluster.submit("program.py", copy_code=False)
    assert str(project / "program.py") in job.script
    job.cancel()
    monkeypatch.setattr(code_copy, "ENTRIES", 3)
    with pytest.raises(UserError, match="entries beside the code of the job, more than 3: keep"):
        cluster.submit("program.py")
    assert len(cluster.jobs()) == 1


def test_ranks_of_a_module_run_the_copy(project):
    job = cluster.submit("program", gpus=2)
    Path("my_helper.py").write_text("def word():\n    return 'edited'\n")
    assert job.wait(timeout=600).logs(rank=1).startswith("first!\n")
    assert job.logs().count("first!") == 2

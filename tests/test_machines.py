"""`make machines` without root file systems: its readers and expectations.

Its agreement with the Dockerfile.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.lab import kit

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "deploy" / "image"


def load(name: str) -> Any:
    """Import a module of tests/machines, which runs as a program."""
    sys.path.insert(0, str(ROOT / "tests" / "machines"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


cases, dockerfile, machine, pip_settings, proxy = map(
    load, ("cases", "dockerfile", "machine", "pip_settings", "proxy")
)
STAGES = dockerfile.read_stages((ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "machines"), *arguments], capture_output=True, text=True
    )


def test_every_case_is_listed_with_its_description():
    lines = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(cases.CASES)
    assert all(len(line.split()) > 3 for line in lines)


def test_an_unknown_case_is_one_line():
    done = run("offlin")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "there are user, root" in done.stderr


def done(status: int | None, stderr: str = "", stdout: str = "") -> Any:
    return machine.Done("make lab", status, stdout, stderr, 1.0)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        (done(2, "setup: no disk space\nmake: *** [Makefile:44: setup] Error 2\n"), ""),
        (done(1, "setup: no disk space\n"), "exit status 1 instead of 2"),
        (done(2, "first\nsetup: no disk space\n"), "2 lines on stderr instead of one"),
        (done(2, ""), "0 lines on stderr instead of one"),
        (done(2, "setup: no network\n"), "the line lacks 'disk'"),
        (
            done(2, "setup: no disk space\n", "Traceback (most recent call last)"),
            "1 lines on stderr instead of one",
        ),
        (done(None), "stopped after its time limit"),
    ],
)
def test_a_refusal_is_one_line_with_status_2(what, wrong):
    assert cases.one_line("disk")(what) == wrong


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        (done(0, stdout="ready"), ""),
        (done(0), "the output lacks 'ready'"),
        (done(0, stdout="ready, slowly"), "the output has 'slowly'"),
        (done(1, stdout="ready"), "exit status 1"),
    ],
)
def test_works_requires_status_0_and_the_text(what, wrong):
    assert cases.works("ready", without="slowly")(what) == wrong


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_class_is_graded_when_the_first_has_all_points(sandbox):
    warning = "" if sandbox else "NO SANDBOX here\n"
    table = "│ ada     │    54 │  54 │ GRADED │\n│ chloe   │     0 │  54 │ NO_ATTEMPT │\n"
    assert cases.graded(sandbox)(done(0, warning, table)) == ""
    assert cases.graded(not sandbox)(done(0, warning, table)) != ""
    assert (
        cases.graded(sandbox)(done(0, warning, table.replace(" 54 │  54", " 53 │  54")))
        == "ada does not have all points"
    )


MMDEBSTRAP = """#!/bin/sh
for folder; do :; done
mkdir -p "$folder/etc"
printf '%s\\n' "$@" >> "$(dirname "$0")/asked"
"""


def test_testing_is_built_from_a_snapshot_too(tmp_path, monkeypatch):
    (tmp_path / "mmdebstrap").write_text(MMDEBSTRAP, encoding="utf-8")
    (tmp_path / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    layers = machine.Layers(tmp_path / "cache", pip_settings.PipSettings({}, []))
    folders = {suite: layers.bare(suite) for suite in (machine.SUITE, machine.TESTING, machine.TESTING)}
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert [asked.count(suite) for suite in folders] == [1, 1]  # the second time it is in the cache
    assert len(set(folders.values())) == 2
    assert asked.index(machine.SUITE) < asked.index('--aptopt=Acquire::Check-Valid-Until "false"')
    assert (folders[machine.TESTING] / "etc" / "hosts").read_text(encoding="utf-8") == machine.HOSTS


def test_the_environment_overrides_pips_files():
    listed = "global.index-url='https://a.invalid/simple'\n:env:.index-url='https://b.invalid/simple'\nglobal.extra-index-url='c\\nd'\n"
    assert pip_settings.variables(listed) == {
        "PIP_INDEX_URL": "https://b.invalid/simple",
        "PIP_EXTRA_INDEX_URL": "c d",
    }


def test_files_that_pips_settings_name_are_bound(tmp_path):
    index, certificates = tmp_path / "index" / "simple", tmp_path / "site.pem"
    index.mkdir(parents=True)
    certificates.touch()
    given = {"PIP_INDEX_URL": f"file://{index}", "PIP_CERT": str(certificates), "PIP_DEFAULT_TIMEOUT": "180"}
    settings = pip_settings.handed_over(given)
    there = f"{pip_settings.FILES}/site.pem"
    assert settings.environment == {**given, "PIP_CERT": there}
    assert settings.binds == [(str(index.parent), str(index.parent), "ro"), (str(certificates), there, "ro")]


def test_the_proxy_forwards_and_counts():
    way_out = proxy.Proxy()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as server:
        socket.send_fds(way_out.channel, [b"proxy"], [listener.fileno()])
        with socket.create_connection(listener.getsockname(), timeout=20) as client:
            client.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % server.getsockname()[1])
            assert client.recv(1024).startswith(b"HTTP/1.1 200")
            there, _ = server.accept()
            with there:
                client.sendall(b"question")
                assert there.recv(1024) == b"question"
                there.sendall(b"answer")
                assert client.recv(1024) == b"answer"
    assert way_out.hosts == {"127.0.0.1": 1}
    way_out.close()


def test_an_unknown_instruction_is_an_error():
    with pytest.raises(ValueError, match="unknown instruction: HEALTHCHECK"):
        dockerfile.read_stages("FROM debian AS base\nHEALTHCHECK NONE\n")
    with pytest.raises(ValueError, match="RUN --network=none"):
        dockerfile.run_line("--network=none true")


def test_a_line_continues_after_a_backslash():
    text = "FROM debian AS base\n# not this\nRUN --mount=type=cache,target=/c \\\n    true\n"
    ((_, rest),) = dockerfile.read_stages(text)["base"].steps
    assert dockerfile.run_line(rest) == (["/c"], "true")


def test_the_students_image_holds_what_the_kit_holds():
    copied = {source for sources, _ in STAGES["student"].copies() for source in sources}
    top_level = {name for name in kit.FILES if "/" not in name and not name.startswith(".")}
    assert copied == {*top_level, *kit.FOLDERS, "labs"}
    for name in ("base", "student", "hub"):
        for stage in dockerfile.lineage(STAGES, name):
            assert "solutions" not in str(list(stage.copies())), name


def test_the_steps_of_the_image_are_there_and_all_of_them_are_used():
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for stage in STAGES.values():
        assert stage.parent in STAGES or stage.name == "base"
        assert all((ROOT / source).exists() for sources, _ in stage.copies() for source in sources)
    for step in IMAGE.iterdir():
        assert f"/{step.name}" in text or f" {step.name}" in text, f"the Dockerfile does not use {step.name}"
        assert step.suffix != ".sh" or step.stat().st_mode & 0o111, f"{step.name} cannot be executed"


@pytest.mark.parametrize("script", sorted(IMAGE.glob("*.sh")), ids=lambda script: script.name)
def test_the_steps_of_the_image_are_sound_shell(script):
    command = ["shellcheck", str(script)] if shutil.which("shellcheck") else ["sh", "-n", str(script)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_stage_runs_as_the_user_that_the_image_makes():
    assert "student" in (IMAGE / "user.sh").read_text(encoding="utf-8").split()
    for stage in STAGES.values():
        assert [rest for instruction, rest in stage.steps if instruction == "USER"][-1] == "student"


def test_the_dev_container_builds_on_a_stage_of_the_dockerfile():
    folder = ROOT / ".devcontainer"
    settings = json.loads((folder / "devcontainer.json").read_text(encoding="utf-8"))
    assert (folder / settings["build"]["dockerfile"]).resolve() == ROOT / "deploy" / "Dockerfile"
    assert (folder / settings["build"]["context"]).resolve() == ROOT
    assert settings["build"]["target"] in STAGES
    assert settings["remoteUser"] == "student"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{settings['onCreateCommand'].removeprefix('make ')}:" in makefile


def test_the_readme_names_the_packages_of_the_image():
    lines = (
        line.split("#")[0].strip()
        for line in (IMAGE / "packages.txt").read_text(encoding="utf-8").splitlines()
    )
    packages = {line for line in lines if line}
    told = re.findall(r"apt-get install -y ([a-z0-9 +.-]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert told
    for names in told:
        assert {"make", "git", "python3-venv"} <= set(names.split()) <= packages

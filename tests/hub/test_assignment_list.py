"""The Assignment List in JupyterLab: nbgrader's answers, from a process that ends when it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tornado.web import HTTPError

from dlo_lib.hub import assignment_list
from dlo_lib.hub.assignment_list import AssignmentProcess

SERVER = "import sys; from jupyter_server.serverapp import main; main(sys.argv[1:])"
TOKEN = "secret"
LAB = {"course_id": "deep", "assignment_id": "91_small"}
START_S = 120


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a student with a copy of a lab that is released in the course "deep"."""
    work, course = tmp_path / "work", tmp_path / "exchange" / "deep"
    for folder in (work, course / "outbound" / "91_small", course / "inbound", course / "feedback"):
        folder.mkdir(parents=True)
    (course / "inbound").chmod(0o3733)
    (course / "outbound" / "91_small" / "small.ipynb").write_text("{}")
    (tmp_path / "nbgrader_config.py").write_text(
        f"c = get_config()\nc.Exchange.root = {str(tmp_path / 'exchange')!r}\n"
        f"c.Exchange.cache = {str(tmp_path / 'cache')!r}\nc.CourseDirectory.root = {str(work)!r}\n"
    )
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    return work


def below(process: psutil.Process) -> list[psutil.Process]:
    """The processes of nbgrader below a process; JupyterLab's server has others for a while."""
    found = []
    for one in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a child of an earlier test that has just ended
            if assignment_list._SERVE in " ".join(one.cmdline()):
                found.append(one)
    return found


def test_the_process_ends_when_it_is_idle_and_comes_back(work: Path, monkeypatch) -> None:
    monkeypatch.setattr(assignment_list, "IDLE_S", 0.01)
    before = set(below(psutil.Process()))

    async def calls() -> list[dict[str, Any]]:
        nbgrader = AssignmentProcess(str(work))
        answers = []
        for _ in range(2):
            answers.append(await nbgrader.call("list_assignments", course_id="deep"))
            (started,) = set(below(psutil.Process())) - before
            while started.is_running():
                await asyncio.sleep(0.05)
            assert not nbgrader.runs
        return answers

    for answer in asyncio.run(calls()):
        assert [(lab["assignment_id"], lab["status"]) for lab in answer["value"]] == [
            ("91_small", "released")
        ]


def test_a_killed_process_is_said_and_replaced(work: Path) -> None:
    async def calls() -> tuple[dict[str, Any], dict[str, Any]]:
        nbgrader = AssignmentProcess(str(work))
        first = asyncio.create_task(nbgrader.call("submit_assignment", **LAB))
        while not nbgrader.runs:
            await asyncio.sleep(0.01)
        assert nbgrader._process is not None
        nbgrader._process.kill()
        killed = await first
        again = await nbgrader.call("list_courses")
        second = nbgrader._process
        nbgrader._close()
        await second.wait()
        return killed, again

    killed, again = asyncio.run(calls())
    assert killed == {
        "success": False,
        "value": "the process of nbgrader ended (out of memory?): try again",
    }
    assert again == {"success": True, "value": ["deep"]}


@pytest.fixture
def server(work: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A Jupyter server with the extension, in the folder of a student: its address and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"ServerApp": {"jpserver_extensions": {assignment_list.__name__: True}}}
    (work.parent / "jupyter_server_config.json").write_text(json.dumps(settings))
    options = [
        f"--ServerApp.port={port}",
        f"--IdentityProvider.token={TOKEN}",
        "--no-browser",
        "--allow-root",
    ]
    with open(work.parent / "log", "wb") as log:
        process = psutil.Popen([sys.executable, "-c", SERVER, *options], cwd=work, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    try:
        while True:
            try:
                ask(address, "/api")
                break
            except OSError:
                said = (work.parent / "log").read_text()
                assert process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.2)
        yield address, process
    finally:
        process.terminate()
        process.wait()


def ask(address: str, path: str, body: dict[str, str] | None = None, token: str = TOKEN) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Authorization": f"token {token}"})
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.loads(answer.read())


def test_a_student_fetches_and_submits(server: tuple[str, psutil.Process], work: Path) -> None:
    address, process = server
    assert not below(process)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ask(address, "/assignments/submit", LAB, token="wrong")
    assert ask(address, "/courses") == {"success": True, "value": ["deep"]}
    fetched = ask(address, "/assignments/fetch", LAB)
    assert [lab["status"] for lab in fetched["value"]] == ["fetched"]
    assert fetched["value"][0]["path"] == "91_small"
    assert (work / "91_small" / "small.ipynb").exists()
    submitted = ask(address, "/assignments/submit", LAB)
    assert sorted(lab["status"] for lab in submitted["value"]) == ["fetched", "submitted"]
    assert len(list((work.parent / "exchange" / "deep" / "inbound").iterdir())) == 1
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(address, "/assignments/submit", ["deep"])
    failed = ask(address, "/assignments/submit", {**LAB, "assignment_id": "92_none"})
    assert not failed["success"]
    assert "92_none" in failed["value"]
    (nbgrader,) = below(process)
    process.terminate()
    _, alive = psutil.wait_procs([nbgrader], timeout=START_S)
    assert not alive


@pytest.mark.parametrize(
    "body", [[], ["deep"], {}, {"course_id": "deep"}, {**LAB, "course_id": ["deep"]}, "deep", 7, None]
)
def test_a_request_without_the_two_ids_is_a_mistake_of_the_client(body: object) -> None:
    handler = object.__new__(assignment_list.ActionHandler)
    handler.request = SimpleNamespace(arguments={}, body=json.dumps(body).encode())
    handler._jupyter_current_user = None
    with pytest.raises(HTTPError) as caught:
        handler._lab()
    assert caught.value.status_code == 400


def test_a_request_has_its_ids_as_json_or_in_the_form() -> None:
    handler = object.__new__(assignment_list.ActionHandler)
    handler.request = SimpleNamespace(arguments={}, body=json.dumps(LAB).encode())
    assert handler._lab() == LAB
    form = {name: [value.encode()] for name, value in LAB.items()}
    handler.request = SimpleNamespace(arguments=form, body=b"")
    assert handler._lab() == LAB


def test_a_page_of_another_version_is_named(server: tuple[str, psutil.Process]) -> None:
    address, process = server
    installed = version("nbgrader")
    assert ask(address, f"/nbgrader_version?version={installed}") == {"success": True}
    answer = ask(address, "/nbgrader_version?version=0.1")
    assert f"the page has nbgrader 0.1 and the server {installed}" in answer["message"]
    assert not below(process)


def test_only_the_methods_of_the_list_are_called(work: Path) -> None:
    command = [sys.executable, "-c", assignment_list._SERVE]
    done = subprocess.run(
        command, input='["load_config", {}]\n', capture_output=True, text=True, cwd=work, env=os.environ
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "ValueError: no method load_config" in done.stderr

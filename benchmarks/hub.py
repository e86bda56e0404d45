"""A class on a JupyterHub on one machine: what N students cost who open a lab, run its cells, have four
ranks up, train on them, submit in the same minute, and check their work.

Memory is the proportional set size (PSS) of all processes of a student: a page that several processes share
counts in parts. *Idle*: JupyterLab and the kernel of an open lab whose first cells have run, after the ranks
of these cells were released. *With ranks*: in addition, four ranks that wait; they come back by themselves.
*Trained*: the four ranks have trained with DDP and AdamW. *Idle again*: a while after all have submitted and
checked. The goals are 350 MB and 600 MB. The students are real Unix users, whose servers the Hub starts with
the limits of its configuration.

The students do each step together, except that a few at a time open the lab, run its cells and check their
work: on a machine with few processors more at a time take as long, and a step with six ranks or a check holds
memory that is not there for all at once.

It needs root and a JupyterHub: ``make hub ARGS="benchmark --pairs 30"``, with 30 students.
"""

from __future__ import annotations

import asyncio
import json
import pwd
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from benchmarks.paired import Row, Spread
from dlo_lib.base.errors import UserError
from tests.hub.class_on_hub import ClassOnHub, class_on_hub, missing

LAB = "10_collectives"
NOTEBOOK = "collectives.ipynb"
STUDENTS = 3
ROWS = 5
MB = 1e6
IDLE_MB, RANKS_MB = 350, 600
STEP_S = 3600
"""The longest time of a step of all students, also on a busy machine."""
AT_A_TIME = 4
"""Students who open the lab, run its cells, or check their work, at the same time."""
RANKS_IDLE = "0:01:00"
IDLE_PROCESSES = 3  # JupyterLab, the kernel, and the seed of its ranks
FIRST_CELLS = 2  # of the notebook: its imports
RANKS = """
import time
from pathlib import Path
from dlo_lib.launch import run_ranks
def wait():
    import torch.distributed as dist
    {work}
    dist.barrier()
    Path("ranks_are_up").touch()
    while not Path("enough").exists():
        time.sleep(0.1)
    return True
assert all(run_ranks(wait, 4, timeout={timeout}))
"""
TRAIN = """
    import torch
    from torch.nn.parallel import DistributedDataParallel
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
"""
CHECK = f"""
import subprocess
print(subprocess.run(["dlo", "check", "{LAB}"], capture_output=True, text=True).stdout[-300:])
"""


@dataclass(frozen=True)
class Student:
    """A student with a running server and a kernel."""

    hub: ClassOnHub
    name: str
    token: str
    kernel: str

    @property
    def folder(self) -> Path:
        return self.hub.home(self.name) / "dlo-labs" / LAB

    def run(self, code: str) -> str:
        """Run a cell in the kernel and return what it prints.

        Raises:
            UserError: the cell raises an exception.
        """
        return asyncio.run(self._run(code))

    async def _run(self, code: str) -> str:
        url = f"{self.hub.url}/user/{self.name}/api/kernels/{self.kernel}/channels".replace("http", "ws", 1)
        headers = {"Authorization": f"token {self.token}"}
        request = HTTPRequest(url, headers=headers, connect_timeout=60, request_timeout=STEP_S)
        channel = await websocket_connect(request)
        number = uuid.uuid4().hex
        header = {
            "msg_id": number,
            "msg_type": "execute_request",
            "username": "",
            "session": number,
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        message = {
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
            "channel": "shell",
        }
        await channel.write_message(json.dumps(message))
        printed: list[str] = []
        try:
            while True:
                text = await asyncio.wait_for(channel.read_message(), STEP_S)
                if text is None:
                    raise UserError(
                        f"the server of {self.name} closed the connection: its memory limit is reached"
                    )
                answer = json.loads(text)
                if answer["parent_header"].get("msg_id") != number:
                    continue
                if answer["msg_type"] == "stream":
                    printed.append(answer["content"]["text"])
                elif answer["msg_type"] == "error":
                    raise UserError(f"a cell of {self.name} failed: {answer['content']['evalue']}")
                elif answer["msg_type"] == "status" and answer["content"]["execution_state"] == "idle":
                    return "".join(printed)
        finally:
            channel.close()


def rows(pairs: int = STUDENTS) -> Iterator[Row]:
    """``pairs`` is the number of students."""
    if reason := missing():
        raise UserError(f'{reason}: make hub ARGS="benchmark --pairs {pairs}"')
    _require_memory(pairs)
    people = [f"s{number:02d}" for number in range(pairs)]
    with (
        class_on_hub((*people, "head"), full=True, second=False, ranks_idle=RANKS_IDLE) as hub,
        ThreadPoolExecutor(AT_A_TIME) as few,
        ThreadPoolExecutor(pairs) as pool,
    ):
        names = [hub.person(one) for one in people]
        hub.enrol("deep", *names)
        hub.release("deep", LAB)
        began = time.monotonic()
        students = list(few.map(lambda name: opened(hub, name), names))
        cells = first_cells(hub)
        _all(few, students, lambda student: student.run(cells))
        wall = time.monotonic() - began
        cpu = cpu_of(students) / pairs
        note = f"{pairs} students opened a lab in {wall:.0f} s, {cpu:.1f} s of CPU time each"
        working = statistics.median(memory(student)[0] for student in students)
        _wait_for_release(students)
        note += f"; {working:.0f} MB before their ranks were released"
        yield _memory_row("idle student", IDLE_MB, [memory(student) for student in students], note)

        limits = hub.settings.limits
        note = f"limits: {limits.memory}, {limits.processors:g} processors, {limits.processes} processes"
        for name, work in (("student with four ranks", ""), ("after DDP and AdamW on them", TRAIN)):
            held = with_ranks(pool, students, work)
            yield _memory_row(name, RANKS_MB, held, note)

        began = time.monotonic()
        _all(pool, students, submit)
        submitted = time.monotonic() - began
        inbound = hub.settings.exchange / "deep" / "inbound"
        arrived = {folder.name.partition("+")[0] for folder in inbound.iterdir()}
        said = hub.dlo("deep", "collect", LAB)
        if arrived != set(names) or f"{pairs} received" not in said:
            raise UserError(
                f"{len(arrived)} of {pairs} submissions arrived, and dlo collect says: {said[-300:]}"
            )
        share = len(arrived) / pairs
        note = f"all {pairs} submissions within {submitted:.1f} s, and received by dlo collect"
        yield Row("submissions that arrive", "students", pairs, Spread(share, share, share, pairs), note=note)

        began = time.monotonic()
        _all(few, students, lambda student: student.run(CHECK))
        checked = time.monotonic() - began
        _wait_for_release(students)
        held = [memory(student) for student in students]
        note = f"after training, a submission, and checks of all in {checked:.0f} s"
        yield _memory_row("idle again", IDLE_MB, held, note)


def _require_memory(students: int) -> None:
    needed, there = students * RANKS_MB * MB, psutil.virtual_memory().available
    if needed > there:
        raise UserError(
            f"{students} students need {needed / 1e9:.0f} GB, and {there / 1e9:.0f} GB are available: "
            f"use --pairs {int(there / MB) // RANKS_MB}"
        )


def _wait_for_release(students: list[Student]) -> None:
    """Wait until the ranks of all students, and the processes that fork them, have ended."""
    released = time.monotonic() + STEP_S
    while any(len(processes(student.name)) > IDLE_PROCESSES for student in students):
        if time.monotonic() > released:
            raise UserError("idle ranks were not released")
        time.sleep(0.5)


def with_ranks(pool: ThreadPoolExecutor, students: list[Student], work: str) -> list[tuple[float, float]]:
    """Let all students run ``work`` on four ranks, and return their memory while the ranks wait."""
    files = [student.folder / name for student in students for name in ("ranks_are_up", "enough")]
    code = RANKS.format(work=work.strip(), timeout=STEP_S)
    waiting = [pool.submit(student.run, code) for student in students]
    while not all((student.folder / "ranks_are_up").exists() for student in students):
        if failed := [future for future in waiting if future.done()]:
            failed[0].result()
            raise UserError("the ranks ended before they were measured")
        time.sleep(0.2)
    held = [memory(student) for student in students]
    for student in students:
        (student.folder / "enough").touch()
    for future in waiting:
        future.result()
    for file in files:
        file.unlink()
    return held


def _all(pool: ThreadPoolExecutor, students: list[Student], do: Callable[[Student], object]) -> None:
    for future in [pool.submit(do, student) for student in students]:
        future.result()


def _memory_row(name: str, goal: int, parts: list[tuple[float, float]], note: str) -> Row:
    held, files = [one for one, _ in parts], statistics.median(of_files for _, of_files in parts)
    ratios = [one / goal for one in held]
    shown = (
        f"median {statistics.median(held):.0f} MB, largest {max(held):.0f} MB, {files:.0f} MB of them files "
    )
    shown += f"(libraries) that all students share; {note}"
    spread = Spread(statistics.median(ratios), min(ratios), max(ratios), len(held))
    return Row(name, f"{goal} MB", len(held), memory_ratio=spread, note=shown)


def opened(hub: ClassOnHub, name: str) -> Student:
    """Start the server of a student and a kernel in the folder of the lab."""
    hub.start_server(name)
    token = hub.token_of(name)
    body = {"kernel": {"name": "python3"}, "name": NOTEBOOK, "path": f"{LAB}/{NOTEBOOK}", "type": "notebook"}
    session = hub.request(f"/user/{name}/api/sessions", token, "POST", body)
    return Student(hub, name, token, session["kernel"]["id"])


def first_cells(hub: ClassOnHub) -> str:
    """Return the code that a student runs to begin the lab."""
    notebook = json.loads((hub.settings.labs / "labs" / LAB / NOTEBOOK).read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return "\n".join(code[:FIRST_CELLS])


def submit(student: Student) -> None:
    """Press Submit in the Assignment List."""
    body = {"course_id": "deep", "assignment_id": LAB}
    page = f"/user/{student.name}/assignments/submit"
    answer: dict[str, Any] = student.hub.request(page, student.token, "POST", body)
    if not answer["success"]:
        raise UserError(f"{student.name} could not submit: {str(answer['value'])[-300:]}")


def processes(name: str) -> list[psutil.Process]:
    """Return all processes of a Unix user."""
    number = pwd.getpwnam(name).pw_uid
    return [one for one in psutil.process_iter(["uids"]) if one.info["uids"].real == number]


def memory(student: Student) -> tuple[float, float]:
    """Return the proportional set size of all processes of a student, and that of files in it, in MB."""
    held = {"Pss": 0, "Pss_File": 0}
    for process in processes(student.name):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        for line in lines:
            if (name := line.partition(":")[0]) in held:
                held[name] += int(line.split()[1]) * 1024
    return held["Pss"] / MB, held["Pss_File"] / MB


def cpu_of(students: list[Student]) -> float:
    """Return the CPU seconds of the running processes of all students."""
    return sum(sum(process.cpu_times()[:2]) for student in students for process in processes(student.name))

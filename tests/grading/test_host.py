"""The judge's processes: each ends with what started it, whoever that is and however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlo_lib.grading.host import Zygote, after
from dlo_lib.grading.outcome import Ended, Status

STARTS_ONE = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\ndef pid(): return child.pid"
HOLD = f"""
import time
from dlo_lib.grading.host import Zygote, after
zygote = Zygote()
worker = zygote.worker()
worker.ask(after(60), do="load", cells=[{{"id": "a", "own": True, "source": {STARTS_ONE!r}}}])
child = worker.ask(after(60), do="call", name="pid", args=[], kwargs={{}})["value"]
print(zygote._process.pid, worker.pid, child, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def soon(condition) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def cell(source: str) -> dict[str, object]:
    return {"do": "load", "cells": [{"id": "a", "own": True, "source": source}]}


def call(name: str) -> dict[str, object]:
    return {"do": "call", "name": name, "args": [], "kwargs": {}}


def test_what_a_worker_started_ends_with_it(zygote: Zygote) -> None:
    worker = zygote.worker()
    worker.ask(after(20), **cell(STARTS_ONE))
    child = worker.ask(after(5), **call("pid"))["value"]
    assert not gone(child)
    worker.close()
    assert soon(lambda: gone(child) and gone(worker.pid))


def test_nothing_is_left_when_the_judge_is_killed() -> None:
    judge = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert judge.stdout is not None
    pids = [int(pid) for pid in judge.stdout.readline().split()]
    assert len(pids) == 3
    assert not any(map(gone, pids))
    judge.send_signal(signal.SIGKILL)
    judge.wait()
    assert soon(lambda: all(map(gone, pids)))


def test_an_answer_made_ahead_is_not_heard(zygote: Zygote) -> None:
    worker = zygote.worker()
    early = "import gc\nfrom dlo_lib.grading.channel import Channel\n"
    early += "line = next(x for x in gc.get_objects() if isinstance(x, Channel))\n[line.send({'id': n, 'value': 1}) for n in range(99)]\n"
    worker.ask(after(20), **cell(early + "def late():\n    import time; time.sleep(60)"))
    with pytest.raises(Ended) as ended:
        worker.ask(after(0.3), **call("late"))
    assert ended.value.status is Status.TIMEOUT
    worker.close()


def test_the_folder_of_a_worker_is_its_own_and_goes_with_it(zygote: Zygote) -> None:
    one, two = zygote.worker(), zygote.worker()
    one.ask(after(20), **cell("open('here', 'w').write('x')"))
    assert (one.folder / "here").exists()
    assert not (two.folder / "here").exists()
    one.close()
    two.close()
    assert not one.folder.exists()

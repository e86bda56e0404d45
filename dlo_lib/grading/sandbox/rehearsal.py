"""Run the steps of a worker in the zygote, before the fork, so that workers need less CPU time.

CPython writes to the code of a function at its first calls: it counts the calls, then replaces instructions
by faster ones for the types that it has seen (PEP 659). The dynamic linker writes to a library's table at the
first call of each of its functions. In a fork, each of these writes copies a page of memory, and every worker
repeats the work. The rehearsal does it once. It runs no code of a student, and leaves no name behind.

Cost: 0.05 s of CPU time for each zygote. It saves a rank a quarter of its page faults and a third of its CPU
time.
"""

from __future__ import annotations

import base64
import gc
import json
import linecache
import socket
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell

from dlo_lib.grading.checks.codec import HEAD, pack
from dlo_lib.grading.checks.contract import Scenario
from dlo_lib.grading.sandbox import worker
from dlo_lib.grading.switch.link import Link
from dlo_lib.grading.switch.scenario import code_of

ROUNDS = 10  # CPython adapts a function after 8 calls
CELL = """import torch
from torch import Tensor

class Rehearsed:
    def __init__(self, size: int) -> None:
        self.values = [float(place) for place in range(size)]

def rehearsed(values: Tensor, more: list[int]) -> dict[str, Tensor]:
    return {"sum": values + len(more), "zeros": torch.zeros(2, 3)}
"""
SCENARIO = """def rehearsal(student, rank, world, values):
    dist.all_reduce(values)
    mark("end")
    return student.rehearsed(values, [1, 2])
"""
VALUES = (2, 3)  # the shape of the tensor that the rehearsal reduces, in float32


def rehearse() -> None:
    """Load cells, read a name, call a function, and run a rank of a world of one; several times."""
    gc.freeze()  # otherwise each mark looks at every object of torch
    names = InteractiveShell.instance().user_ns
    before = dict(names)
    for number in range(ROUNDS):
        cell = f"rehearsal_{number}"
        call = {"do": "call", "name": "rehearsed", "args": [torch.ones(VALUES), [1, 2]], "kwargs": {}}
        _serve(
            {"do": "load", "cells": json.dumps([{"id": cell, "source": CELL, "own": True}])},
            {"do": "get", "name": "__name__"},
            call,
        )
        _run_rank(names)
        linecache.cache.pop(f"<cell {cell}>", None)
    names.clear()
    names.update(before)


def _serve(*requests: dict[str, Any]) -> None:
    """Let the loop of a worker answer these requests; nothing reads its answers."""
    judge, line = socket.socketpair()
    with judge, line:
        for number, request in enumerate(requests):
            judge.sendall(pack({"id": number, **request}))
        judge.shutdown(socket.SHUT_WR)
        worker.serve(line)


def _run_rank(names: dict[str, Any]) -> None:
    """Run the scenario; the answers of the switch to its two calls are written in advance."""
    judge, line = socket.socketpair()
    values = torch.ones(VALUES)
    with judge, line:
        for call, sizes in ((1, [values.nbytes]), (2, [])):
            head = json.dumps({"done": call, "source": -1, "sizes": sizes}).encode()
            judge.sendall(HEAD.pack(len(head), sum(sizes)) + head + bytes(sum(sizes)))
        code = base64.b64encode(code_of(Scenario("rehearsal", SCENARIO))).decode()
        request = {"name": "rehearsal", "code": code, "rank": 0, "world": 1}
        worker.run_rank({**request, "inputs": {"values": values}}, names, Link(line))
    dist.destroy_process_group()

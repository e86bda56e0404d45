"""Covert channels between two ranks under judgement: how many bits one tells the other past the judge.

One worker sends random bits at 2 bits a second, and another one reads them. Both know the time at which the
bits begin. Two channels are open, because the kernel has no namespace for them:

- the load of the processors: for a 1 the sender computes in four threads, for a 0 it sleeps; the reader
  counts the rounds of a loop in the time of a bit;
- free memory: for a 1 the sender holds 200 MiB, for a 0 nothing; the reader asks ``sysinfo``.

The reader takes the bits above the median of its figures as 1. It also tries the opposite, and the better of
both counts. With an error rate e a bit tells 1 - H(e), where H is the binary entropy; 40 random guesses tell
about 0.02 in this way. A row has the bits a second that got through. The result depends on the load of the
machine, so the note states it.
"""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.paired import Row
from dlo_lib.grading.checks.contract import Scenario, scenario
from dlo_lib.grading.judge.attempt import Attempt, RemoteStudent
from dlo_lib.grading.judge.cells import Origin, SubmissionCell
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import required_isolation

BITS = 40
SLOT = 0.5  # seconds of a bit
CELL = """
import ctypes, hashlib, threading, time
libc = ctypes.CDLL(None)
block = bytes(1 << 16)

def wait(until):
    while time.monotonic() < until: time.sleep(0.002)

def compute(until):
    while time.monotonic() < until: hashlib.sha256(block)

def send_by_load(bits, start, slot):
    for place, bit in enumerate(bits):
        wait(start + place * slot)
        until = start + (place + 0.95) * slot
        threads = [threading.Thread(target=compute, args=(until,)) for _ in range(4 * bit)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()

def read_by_load(count, start, slot):
    seen = []
    for place in range(count):
        wait(start + (place + 0.1) * slot)
        rounds = 0
        while time.monotonic() < start + (place + 0.9) * slot:
            hashlib.sha256(block)
            rounds += 1
        seen.append(float(rounds))
    return seen

def send_by_memory(bits, start, slot):
    for place, bit in enumerate(bits):
        wait(start + place * slot)
        held = bytearray(b"x") * (200 << 20) if bit else None
        wait(start + (place + 0.95) * slot)
        del held

def read_by_memory(count, start, slot):
    seen, info = [], (ctypes.c_ulong * 64)()
    for place in range(count):
        wait(start + (place + 0.5) * slot)
        samples = []
        while time.monotonic() < start + (place + 0.9) * slot:
            libc.sysinfo(info)
            samples.append(info[5])
            time.sleep(0.01)
        seen.append(float(sum(samples)) / max(1, len(samples)))
    return seen
"""


@scenario
def by_load(student, rank, world, bits, count, slot):
    import time

    start = torch.tensor([time.monotonic() + 0.5], dtype=torch.float64)
    dist.broadcast(start, 0)
    if rank == 0:
        return student.send_by_load(bits, start.item(), slot)
    return student.read_by_load(count, start.item(), slot)


@scenario
def by_memory(student, rank, world, bits, count, slot):
    import time

    start = torch.tensor([time.monotonic() + 0.5], dtype=torch.float64)
    dist.broadcast(start, 0)
    if rank == 0:
        return student.send_by_memory(bits, start.item(), slot)
    return student.read_by_memory(count, start.item(), slot)


CHANNELS = {"the load of the processors": by_load, "free memory": by_memory}
ROWS = len(CHANNELS)


def rows(pairs: int = BITS) -> Iterator[Row]:
    """``pairs`` is the number of bits."""
    with Zygote(isolation=required_isolation()) as zygote:
        for name, way in CHANNELS.items():
            bits = [place % 2 for place in range(pairs)]
            random.Random(name).shuffle(bits)
            seen = _transmitted(zygote, way, bits)
            wrong = errors(bits, seen)
            note = f"{wrong} of {pairs} bits wrong at {1 / SLOT:g} bits a second: "
            note += f"{told(wrong / pairs) / SLOT:.2f} bits a second got through"
            note += f" (load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors)"
            yield Row(f"two ranks, by {name}", "nothing", 2, note=note)


def _transmitted(zygote: Zygote, way: Scenario, bits: list[int]) -> list[float]:
    """Return the figures that the reader measured, one for each bit."""
    attempt = Attempt(zygote, [SubmissionCell("channel", Origin.ANSWER, CELL)], seconds=60)
    try:
        student = RemoteStudent(attempt, "channel", seconds=60 + 4 * SLOT * len(bits))
        inputs = {"count": len(bits), "slot": SLOT}
        run = student.ranks(way, [{"bits": bits, **inputs}, {"bits": [], **inputs}])
    finally:
        attempt.close()
    seen: list[float] = run.results[1]
    return seen


def errors(bits: list[int], seen: list[float]) -> int:
    """Return the number of bits that a reader gets wrong who knows which side of the median is a 1."""
    middle = statistics.median(seen)
    wrong = sum((value > middle) != bool(bit) for bit, value in zip(bits, seen))
    return min(wrong, len(bits) - wrong)


def told(rate: float) -> float:
    """Return the bits that one bit tells if it is wrong at this rate."""
    return 1.0 + sum(part * math.log2(part) for part in (rate, 1 - rate) if part > 0)

"""Covert channels between two ranks under judgement: how many bits one tells the other past the judge.

One worker sends random bits and another one reads them. Both know the time at which the bits begin. The
channels that are open, because the kernel has no namespace for them:

- the load of the processors, 2 bits a second: for a 1 the sender computes in four threads, for a 0 it
  sleeps; the reader counts the rounds of a loop in the time of a bit;
- the numbers of new files, 50 bits a second: the kernel numbers the pipes of all processes one after the
  other, on each processor; for a 1 the sender makes pipes, and the reader looks how far the number of
  the next pipe went up;
- pages of a file in memory, 50 bits a second: for a 1 the sender reads a page that no process has read
  before; the reader reads it too and sees by its count of page faults whether the disk was needed. Each page
  tells one bit, until the machine forgets it.

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
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.paired import Row
from dlo_lib.grading.checks.contract import scenario
from dlo_lib.grading.judge.attempt import Attempt, RemoteStudent
from dlo_lib.grading.judge.cells import Origin, SubmissionCell
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import required_isolation

BITS = 40
STEP = 1 << 14  # bytes between two pages
CELL = """
import hashlib, mmap, os, resource, threading, time
FILE, STEP = "{}", {}
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

def send_by_numbers(bits, start, slot):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    for place, bit in enumerate(bits):
        wait(start + (place + 0.2) * slot)
        while bit and time.monotonic() < start + (place + 0.8) * slot:
            for end in os.pipe(): os.close(end)

def number():
    ends = os.pipe()
    found = os.fstat(ends[0]).st_ino
    for end in ends: os.close(end)
    return found

def read_by_numbers(count, start, slot):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    seen, before = [], number()
    for place in range(count):
        wait(start + (place + 1) * slot)
        before, last = number(), before
        seen.append(float(before - last))
    return seen

def pages():
    file = mmap.mmap(os.open(FILE, os.O_RDONLY), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    file.madvise(mmap.MADV_RANDOM)  # no page beside it is read with it
    return file

def send_by_pages(bits, start, slot):
    file = pages()
    for place, bit in enumerate(bits):
        wait(start + place * slot)
        if bit: file[place * STEP]

def read_by_pages(count, start, slot):
    file, seen = pages(), []
    for place in range(count):
        wait(start + (place + 0.7) * slot)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        file[place * STEP]
        seen.append(float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before))
    return seen

def send(way, *rest): return globals()["send_" + way](*rest)
def read(way, *rest): return globals()["read_" + way](*rest)
"""


@scenario
def transmit(student, rank, world, bits, count, slot, way):
    import time

    start = torch.tensor([time.monotonic() + 0.5], dtype=torch.float64)
    dist.broadcast(start, 0)
    if rank == 0:
        return student.send(way, bits, start.item(), slot)
    return student.read(way, count, start.item(), slot)


CHANNELS = {  # name → the ending of the functions above, seconds of a bit
    "the load of the processors": ("by_load", 0.5),
    "the numbers of new files": ("by_numbers", 0.02),
    "pages of a file in memory": ("by_pages", 0.02),
}
ROWS = len(CHANNELS)


def rows(pairs: int = BITS) -> Iterator[Row]:
    """``pairs`` is the number of bits."""
    with Zygote(isolation=required_isolation()) as zygote:
        for name, (way, slot) in CHANNELS.items():
            bits = [place % 2 for place in range(pairs)]
            random.Random(name).shuffle(bits)
            seen = _transmitted(zygote, way, slot, bits)
            wrong = errors(bits, seen)
            note = f"{wrong} of {pairs} bits wrong at {1 / slot:g} bits a second: "
            note += f"{told(wrong / pairs) / slot:.2f} bits a second got through"
            note += f" (load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors)"
            yield Row(f"two ranks, by {name}", "nothing", 2, note=note)


def _transmitted(zygote: Zygote, way: str, slot: float, bits: list[int]) -> list[float]:
    """Return the figures that the reader measured, one for each bit."""
    file = _forgotten_file(STEP * len(bits))
    attempt = Attempt(zygote, [SubmissionCell("channel", Origin.ANSWER, CELL.format(file, STEP))], seconds=60)
    try:
        student = RemoteStudent(attempt, "channel", seconds=60 + 4 * slot * len(bits))
        inputs = {"count": len(bits), "slot": slot, "way": way}
        run = student.ranks(transmit, [{"bits": bits, **inputs}, {"bits": [], **inputs}])
    finally:
        attempt.close()
    seen: list[float] = run.results[1]
    return seen


def _forgotten_file(least: int) -> Path:
    """Return a file of torch of at least ``least`` bytes, after removing it from memory."""
    files = Path(torch.__file__).parent.rglob("*.py")
    found = next(file for file in sorted(files) if file.stat().st_size >= least)
    descriptor = os.open(found, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return found


def errors(bits: list[int], seen: list[float]) -> int:
    """Return the number of bits that a reader gets wrong who knows which side of the median is a 1."""
    middle = statistics.median(seen)
    wrong = sum((value > middle) != bool(bit) for bit, value in zip(bits, seen))
    return min(wrong, len(bits) - wrong)


def told(rate: float) -> float:
    """Return the bits that one bit tells if it is wrong at this rate."""
    return 1.0 + sum(part * math.log2(part) for part in (rate, 1 - rate) if part > 0)

"""The visible checks of the loader: waits, workers, seeds, streams and shards. Workers are simulated, so no
process is started."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import same, wrong_if

from .scenarios import clocked, drawn, streamed
from .twins import lined_up

# -- 1 · waits


def times_of(t, low: int, high: int, count: int) -> list[float]:
    """Draw seconds that are multiples of 1/64, so that sums are exact."""
    return [t.integer(low, high) / 64 for _ in range(count)]


class Clock:
    """A loader and a step that move a clock, which the check keeps; the student's code calls its methods."""

    def __init__(self, start: float, loads: list[float], durations: list[float]) -> None:
        self.start, self.loads, self.durations = start, loads, durations
        self.now, self.loaded = 100.0, 0

    def begin(self) -> None:
        """Start the loader."""
        self.now += self.start

    def load(self) -> int | None:
        """Return the next batch, which is its number; None at the end."""
        if self.loaded == len(self.loads):
            return None
        self.now += self.loads[self.loaded]
        self.loaded += 1
        return self.loaded - 1

    def step(self, batch: int) -> None:
        """Compute with a batch."""
        self.now += self.durations[batch]

    def clock(self) -> float:
        """Return the seconds."""
        return self.now


def measured(student, t) -> tuple[list[list[float]], float, list[float], list[float]]:
    """Return the student's waits and steps, and the start, the loads and the durations of the clock."""
    count = t.integer(4, 7)
    (start,), loads = times_of(t, 200, 300, 1), times_of(t, 1, 60, count)
    durations = times_of(t, 64, 120, count)
    device = Clock(start, loads, durations)
    parts = {"begin": device.begin, "load": device.load, "step": device.step, "clock": device.clock}
    asked = {name: t.asked(function, calls=20 * count) for name, function in parts.items()}
    result = student.run(clocked, **asked)
    found = zip(t.items(result, 2, "measure_waits(...)"), ("the waits", "the steps"))
    rows = [[t.number(value, "a time") for value in t.items(row, count, name)] for row, name in found]
    return rows, start, loads, durations


@check("waits", points=2)
def check_waits(student, t):
    "The wait of each batch"
    for _ in range(2):
        (waits, _), start, loads, durations = measured(student, t)
        right = [start + loads[0], *loads[1:]]
        with_step = [right[0], *(load + step for load, step in zip(loads[1:], durations))]
        at_once = [start + sum(loads), *[0.0] * (len(loads) - 1)]
        mistakes = {
            "Each wait includes the step before it: read the clock again after the step.": with_step,
            "The first wait lacks the start of the loader: read the clock before the iteration "
            "begins.": loads,
            "All batches are loaded before the first step (list(loader)?): the loader must be read one "
            "batch at a time.": at_once,
            "Every wait is 0: no time passes between the two readings of the clock. The loader works before "
            "each turn of the loop, so read the clock before the loop and after each step, and do not load "
            "all batches before.": [0.0] * len(loads),
            "Each wait begins when the first one does: read the clock again after each step.": list(
                itertools.accumulate(with_step)
            ),
        }
        other = all(wait * 64 % 1 > 0 for wait in waits)
        message = "the waits are {waits}; `clock` moved by multiples of 1/64 s: call it, and no other clock"
        t.that(not other, message, waits=waits)
        wrong_if(t, waits, right, mistakes)
        same(t, waits, right, "the wait for batch {i}")


@check("waits", points=1)
def check_steps(student, t):
    "The duration of each step"
    (_, steps), start, loads, durations = measured(student, t)
    both = [load + step for load, step in zip([start + loads[0], *loads[1:]], durations)]
    lesson = "The steps include the waits: a step begins when its batch has arrived."
    wrong_if(t, steps, durations, {lesson: both})
    same(t, steps, durations, "the duration of step {i}")


@check("waits", points=1)
def check_share(student, t):
    "The share of the time that is waiting"
    for _ in range(2):
        count = t.integer(4, 7)
        waits, steps = [2.0 + t.uniform(1, 2), *times_of(t, 1, 60, count - 1)], times_of(t, 20, 120, count)
        waiting, computing = sum(waits[1:]), sum(steps[1:])
        mean = sum(wait / (wait + step) for wait, step in zip(waits[1:], steps[1:])) / (count - 1)
        first = "The first batch is in the share: leave it out, because it includes the start of the workers."
        mistakes = {
            first: sum(waits) / sum(waits + steps),
            "This is waiting divided by computing: divide by the whole time, the waits and the "
            "steps.": waiting / computing,
            "This is the mean of the shares of single steps: divide the sum of the waits by the sum of the "
            "times.": mean,
        }
        got, right = student.waiting_share(waits, steps), waiting / (waiting + computing)
        same(t, got, right, "waiting_share(...)", mistakes)


# -- 2 · steady


STEADY = "steady_step({load:.3g}, {step:.3g}, {workers})"


@check("steady", points=1)
def check_no_workers(student, t):
    "Without workers, loading and computing alternate"
    lesson = "Without workers the training loads: nothing runs at the same time, so both times add up."
    for _ in range(2):
        load, step = t.uniform(0.1, 2.0), t.uniform(0.1, 2.0)
        got, mistake = student.steady_step(load, step, 0), {lesson: max(load, step)}
        same(t, got, load + step, STEADY, mistake, load=load, step=step, workers=0)


@check("steady", points=1)
def check_with_workers(student, t):
    "With workers, the slower one of loading and computing decides"
    for workers in (1, t.integer(2, 4), t.integer(5, 8)):
        for step in (t.uniform(0.05, 0.15), t.uniform(1.5, 2.0)):
            load = t.uniform(1.3, 1.45)
            each, slower = load / workers, max(step, load)
            mistakes = {
                "Loading and computing run at the same time: the slower one decides, the times do not add "
                "up.": step + each,
                "W workers deliver a batch every load / W seconds: each of them loads another batch.": slower,
                "The model cannot be faster than its own step, however fast the loader is.": each,
            }
            got = student.steady_step(load, step, workers)
            same(t, got, max(step, each), STEADY, mistakes, load=load, step=step, workers=workers)


@check("steady", points=1)
def check_fewest(student, t):
    "The smallest number of workers"
    step = t.integer(1, 6) / 64
    exact = t.integer(2, 9)
    got = t.number(student.fewest_workers(0.0, step), "fewest_workers(load, step)")
    message = (
        "fewest_workers(0.0, step) returns {got}: the smallest number is 1, also if loading takes no time. "
        "0 means that the training loads itself"
    )
    t.that(got >= 1, message, got=got)
    for ratio in (exact, exact + 0.25, exact - 0.25, 0.5):
        want = max(1, math.ceil(ratio))
        got = t.number(student.fewest_workers(ratio * step, step), "fewest_workers(load, step)")
        message = (
            "a batch takes as long as {ratio:g} steps: with {got} workers a batch takes {ratio:g} / {got} "
            "steps. Round up, but an exact ratio is enough, and at least one worker is needed: {want}."
        )
        t.that(type(got) is int and got == want, message, got=got, ratio=ratio, want=want)


# -- 3 · seed_worker


Rows = list[list[float]]


def rows_of(student, t, workers: int, bases: list[int], ranks: Sequence[int] = (0,)) -> Rows:
    """Return the numbers of each worker, which are not those of the copied generator."""
    rows, _ = rows_and_kinds(student, t, workers, bases, ranks)
    return rows


def rows_and_kinds(
    student, t, workers: int, bases: list[int], ranks: Sequence[int]
) -> tuple[Rows, list[str]]:
    """Return the same, and the types of the new generators and of the copied one."""
    result = student.run(drawn, workers=workers, bases=bases, ranks=list(ranks))
    rows, copied, kinds = t.items(result, 3, "the result")
    message = "The data set still has the copied generator: replace get_worker_info().dataset.rng."
    t.that(copied not in rows, message)
    return rows, kinds


@check("seed_worker", points=1)
def check_workers_differ(student, t):
    "Workers draw different numbers"
    rows = rows_of(student, t, t.integer(3, 5), [t.integer(1000, 10**9)])
    for (one, first), (other, second) in itertools.combinations(enumerate(rows), 2):
        t.that(first != second, "workers {one} and {other} draw the same numbers", one=one, other=other)


@check("seed_worker", points=1)
def check_epochs_differ(student, t):
    "Epochs draw different numbers"
    base = t.integer(1000, 10**9)
    first, second = rows_of(student, t, 1, [base, base + t.integer(100, 10**6)])
    lesson = (
        "a worker draws the same numbers in every epoch: the number of the worker is no seed, but "
        "get_worker_info().seed changes with the epoch"
    )
    t.that(first != second, lesson)


@check("seed_worker", points=2)
def check_ranks_differ(student, t):
    "Ranks draw different numbers, although their base seeds are equal"
    workers, ranks = t.integer(60, 70), [0, 1, t.integer(2, 3), t.integer(4, 7)]
    rows = rows_of(student, t, workers, [t.integer(1000, 10**9)], ranks)
    zero, one, *further = (rows[place * workers : (place + 1) * workers] for place in range(4))
    t.that(zero != one, "ranks 0 and 1 draw the same numbers: the rank is not in the seed")
    lesson = (
        "worker {first} of rank 0 and worker {second} of rank {rank} draw the same numbers: a sum of seed "
        "and rank is the same for both. Give default_rng a list"
    )
    workers_of = {tuple(row): worker for worker, row in enumerate(zero)}
    for rank, others in zip(ranks[1:], (one, *further)):
        for second, other in enumerate(others):
            first = workers_of.get(tuple(other))
            t.that(first is None, lesson, first=first, second=second, rank=rank)


@check("seed_worker", points=1)
def check_repeatable(student, t):
    "The same seed gives the same numbers"
    base = t.integer(1000, 10**9)
    rows = rows_of(student, t, 2, [base, base])
    message = (
        "the same seed gives other numbers: default_rng() without a seed takes one from the system, and no "
        "run can be repeated"
    )
    t.that(rows[:2] == rows[2:], message)


# -- 4 · split


@check("seed_worker", points=1)
def check_generator(student, t):
    "The generator is the one of NumPy that default_rng makes"
    _, kinds = rows_and_kinds(student, t, 1, [t.integer(1000, 10**9)], [t.integer(0, 3)])
    message = (
        "dataset.rng is a {kind}: RandomState is NumPy's old interface, and a data set may use methods that "
        "only a Generator has. Use np.random.default_rng"
    )
    own, copied = t.items(kinds, 2, "the generators")
    t.that(own == copied, message, kind=own)


def streams(student, t, world: int, workers: int, count: int) -> list[list[list[int]]]:
    """Return the items of each worker of each rank; the items are distinct numbers."""
    items = t.shuffled(range(100, 100 + count))
    ranks = student.run(streamed, items=items, world=world, workers=workers)
    found = [item for rows in ranks for row in rows for item in row]
    message = "SplitStream yields nothing, or what is not in its items"
    t.that(bool(found) and set(found) <= set(items), message)
    return ranks


@check("split", points=2)
def check_once(student, t):
    "Each item at most once, over all workers of all ranks"
    within = (
        "rank {rank} with {workers} workers yields {got} items, {distinct} of them different: each worker "
        "reads those of the others too"
    )
    between = "ranks {one} and {other} both read {shared} of the items: divide by ranks too"
    for world, workers in ((1, t.integer(2, 4)), (t.integer(2, 3), 2), (t.integer(2, 4), 1)):
        ranks = streams(student, t, world, workers, t.integer(25, 40))
        for rank, rows in enumerate(ranks):
            got, distinct = sum(map(len, rows)), len(set().union(*rows))
            t.that(got == distinct, within, rank=rank, workers=workers, got=got, distinct=distinct)
        for (one, first), (other, second) in itertools.combinations(enumerate(ranks), 2):
            shared = len(set().union(*first) & set().union(*second))
            t.that(shared == 0, between, one=one, other=other, shared=shared)


@check("split", points=1)
def check_equal_ranks(student, t):
    "Every rank yields the same number of items"
    of_workers = (
        "{count} items on {world} ranks: rank {rank} with 2 workers yields {got}, expected {want}. Its "
        "workers need no equal shares, so drop only what is left over between ranks"
    )
    of_ranks = (
        "{count} items on {world} ranks: rank {rank} yields {got}, expected {want} on every rank. What is "
        "left over is dropped, or a rank waits forever"
    )
    for world in (2, t.integer(3, 5)):
        own = 2 * t.integer(3, 4) + 1  # not a multiple of the workers
        count = own * world + t.integer(1, world - 1)
        for rank, rows in enumerate(streams(student, t, world, 2, count)):
            got = len(set().union(*rows))
            values = {"count": count, "world": world, "rank": rank, "got": got, "want": own}
            t.that(got != count // (2 * world) * 2, of_workers, **values)
            t.that(got == own, of_ranks, **values)


@check("split", points=1)
def check_even_workers(student, t):
    "The workers of a rank have equal shares, within one item"
    message = "the workers of a rank have {sizes} items: the largest and smallest number may differ by one"
    lesson = message + ". Blocks of ceil(n / workers) items leave too few for the last worker"
    workers = t.integer(3, 4)
    for own in (workers * t.integer(3, 5) + workers - 1, 2 * workers + 1):
        most = math.ceil(own / workers)
        in_blocks = [max(0, min(most, own - most * k)) for k in range(workers)]
        for rows in streams(student, t, 2, workers, 2 * own):
            sizes = [len(row) for row in rows]
            even = max(sizes) - min(sizes) <= 1
            t.that(even or sizes != in_blocks, lesson, sizes=sizes)
            t.that(even, message, sizes=sizes)


@check("split", points=1)
def check_without_workers(student, t):
    "Without workers, all items of the rank"
    world, own = t.integer(2, 3), t.integer(5, 8)
    without, with_one = (streams(student, t, world, workers, own * world) for workers in (0, 1))
    for rank, ((row,), (only,)) in enumerate(zip(without, with_one)):
        message = "rank {rank} yields {got} items without workers, and {want} with one"
        t.that(len(row) == len(only), message, rank=rank, got=len(row), want=len(only))


# -- 11 · ranges


def parts_of(student, t, *case: Any) -> list[tuple[int, int, int]]:
    """Return the parts of a worker: ranges of samples within their shards."""
    counts, found, what = case[0], student.ranges(*case), "a part of ranges(...)"
    t.that(type(found) in (list, tuple), "ranges(...) should return a list of (shard, first, last)")
    message = (
        "the part {part} is empty, or not within a shard: `first` and `last` count from the start of "
        "their shard, and `last` is the first sample after the part"
    )
    parts = []
    for part in found:
        shard, first, last = (t.number(value, what) for value in t.items(part, 3, what))
        whole = all(type(value) is int for value in (shard, first, last))
        good = whole and 0 <= shard < len(counts) and 0 <= first < last <= counts[shard]
        t.that(good, message, part=part)
        parts.append((shard, first, last))
    return parts


@check("ranges", points=2)
def check_no_overlap(student, t):
    "Each sample at most once, and the same number on every rank"
    for _ in range(2):
        world, workers = t.integer(2, 3), t.integer(2, 3)

        def draw() -> list[int]:
            return [t.integer(3, 9) for _ in range(t.integer(4, 6))]

        counts = t.draw_until(draw, lambda found: sum(found) % world > 0)  # noqa: B023
        samples: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        for rank, worker in itertools.product(range(world), range(workers)):
            for shard, first, last in parts_of(student, t, counts, rank, world, worker, workers):
                samples[rank] += [(shard, place) for place in range(first, last)]
        every = list(itertools.chain(*samples))
        twice = len(every) - len(set(every))
        t.that(twice == 0, "{twice} samples are read twice", twice=twice)
        own = sum(counts) // world
        for rank, got in enumerate(map(len, samples)):
            message = "rank {rank} reads {got} of {total} samples, expected {want} on each of {world} ranks"
            t.that(got == own, message, rank=rank, got=got, total=sum(counts), want=own, world=world)


@check("ranges", points=1)
def check_parts(student, t):
    "The parts of each worker"
    message = "ranges({counts}, {rank}, {world}, {worker}, {workers}) reads {got}, expected {want}"
    for _ in range(2):
        world, workers = t.integer(2, 3), t.integer(2, 4)
        counts = [t.integer(5, 12) for _ in range(t.integer(4, 6))]
        for rank, worker in itertools.product(range(world), range(workers)):
            case = {"counts": counts, "rank": rank, "world": world, "worker": worker, "workers": workers}
            got, want = parts_of(student, t, *case.values()), lined_up(*case.values())
            t.that(got == want, message, **case, got=got, want=want)

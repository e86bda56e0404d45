"""The visible checks of what is measured: times of steps, limits of formats, strides, and the search for a
batch."""

from __future__ import annotations

import math
from typing import Any

import torch

from dlo_lib.grading.checks.contract import NotWritten, Wrong, check
from dlo_lib.labkit.compare import entry, near, same, wrong_if
from dlo_lib.optim.precision.formats import FloatFormat

# -- 1 · timed

LAUNCH = 0.001
"""Seconds in which a call of the simulated device puts its work into the queue."""


class Device:
    """A simulated device with a queue, which the check keeps: the student's code only calls its methods."""

    def __init__(self, costs: list[float], busy: float) -> None:
        self.costs, self.free = costs, busy
        self.now, self.steps, self.waits = 0.0, 0, 0

    def step(self) -> None:
        """Put the work of the next step into the queue."""
        cost = self.costs[min(self.steps, len(self.costs) - 1)]
        self.steps += 1
        self.now += LAUNCH
        self.free = max(self.free, self.now) + cost

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        self.waits += 1
        self.now = max(self.now, self.free)

    def clock(self) -> float:
        """Return the seconds of this device."""
        return self.now


def times_of(student, t, warmup: int, busy: float = 0.0) -> tuple[list[float], Device, list[float]]:
    """Return the student's times, the device after them, and the right times: those of steps that begin on an
    idle device."""
    repeats = t.integer(3, 6)
    costs = [t.uniform(0.5, 1.0) for _ in range(warmup)] + [t.uniform(0.01, 0.1) for _ in range(repeats)]
    device = Device(costs, busy)
    calls = [t.asked(call, calls=10 * len(costs)) for call in (device.step, device.synchronize, device.clock)]
    times = t.items(student.step_times(*calls, warmup, repeats), repeats, "step_times(...)")
    return [t.number(value, "a time") for value in times], device, [LAUNCH + cost for cost in costs[warmup:]]


EARLY = (
    "The clock is read before the device has finished the step: it shows the time to fill the queue. Call "
    "synchronize() after step()."
)
NEVER = "The device is never waited for: the times are those to fill the queue."
BEGUN = "The first time contains the work of the warm-up that was still in the queue: "


@check("timed", points=2)
def check_times(student, t):
    "The clock runs from an idle device to an idle device"
    for _ in range(2):
        warmup = t.integer(2, 4)
        found, device, want = times_of(student, t, warmup)
        # The device starts after the first launch, and works while the others go into the queue.
        first = sum(device.costs[: warmup + 1]) - (warmup - 1) * LAUNCH
        mistakes = {
            EARLY if device.waits else NEVER: [LAUNCH] * len(want),
            BEGUN + "call synchronize() before you read the clock.": [first, *want[1:]],
            BEGUN + "read the clock after synchronize(), not before it.": [first + LAUNCH, *want[1:]],
            "All times are the mean of the steps: return the time of each step.": [sum(want) / len(want)]
            * len(want),
        }
        wrong_if(t, found, want, mistakes)
        cold = [LAUNCH + cost for cost in device.costs[: len(want)]]
        t.that(not near(found, cold), "not tested yet: the warm-up is measured, see the next check")
        same(t, found, want, "time {i}, in seconds of this device,", rtol=0, atol=1e-9)


@check("timed", points=1)
def check_warmup(student, t):
    "The warm-up runs and is not measured"
    warmup = t.integer(2, 4)
    found, device, want = times_of(student, t, warmup)
    t.that(any(value > 0 for value in found), "not tested yet: all times are 0, see the first check")
    message = (
        "A time of {got:.2f} s is that of a step of the warm-up; measured steps take {most:.2f} s at most."
    )
    t.that(bool(max(found[1:]) <= max(want) + LAUNCH), message, got=max(found), most=max(want))
    values = {"steps": device.steps, "warmup": warmup, "repeats": len(want), "total": len(device.costs)}
    message = "{steps} steps ran: {warmup} of the warm-up and {repeats} measured ones are {total}"
    t.that(device.steps == len(device.costs), message, **values)


# -- 2 · limits


def same_limit(student, t, key: str, want, mistakes) -> None:
    """A limit of drawn formats is right; ``want`` and the values of ``mistakes`` take the format."""
    for _ in range(3):
        e, m = t.integer(3, 8), t.integer(2, 12)
        drawn = FloatFormat("drawn", e, m, None)
        value = entry(t, student.limits(e, m), key, "limits(...)")
        wrong = {message: mistake(drawn) for message, mistake in mistakes.items()}
        what = "{key} with {e} exponent bits and {m} mantissa bits"
        same(t, value, want(drawn), what, wrong, rtol=1e-9, atol=0, key=key, e=e, m=m)


@check("limits", points=1)
def check_largest(student, t):
    "The largest finite number"
    mistakes = {
        "This uses the exponent of infinity: if all exponent bits are 1, the number is infinity or NaN. "
        "(The bias is 2 ** (e - 1) - 1.)": lambda f: 2 * f.max,
        "This is the power of two alone: the mantissa of the largest number has all bits 1.": lambda f: (
            2.0**f.bias
        ),
        "The largest mantissa is 1.111...: with the leading 1 that is 2 - eps, not 1 - eps.": lambda f: (
            f.max - 2.0**f.bias
        ),
        "A mantissa with all bits 1 is 2 - eps, a little less than 2.": lambda f: 2.0 ** (f.bias + 1),
    }
    same_limit(student, t, "largest", lambda f: f.max, mistakes)


@check("limits", points=2)
def check_smallest(student, t):
    "The smallest normal and the smallest subnormal number"
    mistakes = {
        "This is 2 ** -bias: the field 0 is that of the subnormal numbers, so the smallest normal number "
        "has the field 1. (The bias is 2 ** (e - 1) - 1.)": lambda f: 2.0**-f.bias,
        "This is the smallest subnormal number.": lambda f: f.smallest_subnormal,
    }
    same_limit(student, t, "smallest_normal", lambda f: f.smallest_normal, mistakes)
    mistakes = {
        "This is the smallest normal number: subnormal ones are smaller.": lambda f: f.smallest_normal,
        "Subnormal numbers have the exponent 1 - bias, not -bias.": lambda f: f.smallest_subnormal / 2,
    }
    same_limit(student, t, "smallest", lambda f: f.smallest_subnormal, mistakes)


@check("limits", points=1)
def check_eps(student, t):
    "The distance from 1 to the next number"
    half = "This is half of the distance: the last bit of the mantissa is worth 2 ** -mantissa_bits."
    same_limit(student, t, "eps", lambda f: f.eps, {half: lambda f: f.eps / 2})


# -- 6 · strides


def same_strides(student, t, channels_last: bool) -> None:
    """The strides of drawn shapes are those of PyTorch."""
    layouts = (torch.contiguous_format, torch.channels_last)
    for _ in range(2):
        shape = tuple(t.integer(2, 9) for _ in range(4))
        strides = [torch.empty(shape, memory_format=layout).stride() for layout in layouts]
        want, other = strides[::-1] if channels_last else strides
        got = t.items(student.strides(shape, channels_last), 4, "strides(...)")
        found = tuple(t.number(value, "a stride") for value in got)
        t.that(found != other, "These are the strides of the other layout.")
        rows = channels_last and found == (want[0], 1, shape[2] * shape[1], shape[1])
        message = "The next row is one width further, not one height: width × channels numbers."
        t.that(not rows or shape[2] == shape[3], message)
        message = (
            "the strides of {shape} are {got}, expected {want}: how far is it to the next image, channel, "
            "row and column?"
        )
        t.that(found == want, message, shape=shape, got=found, want=want)


@check("strides", points=1)
def check_contiguous(student, t):
    "The contiguous layout"
    same_strides(student, t, channels_last=False)


@check("strides", points=1)
def check_channels_last(student, t):
    "The layout channels_last"
    same_strides(student, t, channels_last=True)


# -- 7 · line and search


def on_line(t) -> tuple[dict[int, float], float, float]:
    fixed, per_sample = t.uniform(1e9, 4e9), t.uniform(1e8, 4e8)
    small = t.integer(2, 6)
    sizes = (small, small + t.integer(2, 9))
    return {size: fixed + per_sample * size for size in sizes}, fixed, per_sample


def batch_of(student, t, measured: dict[int, float], capacity: float) -> float:
    return t.number(student.batch_on_line(measured, capacity), "batch_on_line(...)")


@check("line", points=2)
def check_line(student, t):
    "The largest batch on the line through two points"
    for _ in range(3):
        measured, fixed, per_sample = on_line(t)
        want = t.integer(20, 60)
        capacity = fixed + per_sample * (want + t.uniform(0.6, 0.9))
        (small, least), (large, most) = sorted(measured.items())
        mistakes = {
            "The memory does not grow from 0: subtract the fixed part (weights, gradients, optimiser) "
            "before you divide.": math.floor(capacity / per_sample),
            "This is the memory of one measurement divided by its batch: that counts the fixed part once "
            "for each sample.": math.floor(capacity * small / least),
            "The smaller measurement is taken for the fixed part: it contains {small} samples, subtract "
            "them first.": math.floor((capacity - least) * (large - small) / (most - least)),
            "The result is rounded up: that batch does not fit.": want + 1,
        }
        got = batch_of(student, t, measured, capacity)
        same(t, got, want, "batch_on_line(...)", mistakes, rtol=0, small=small)
        got = batch_of(student, t, {large: most, small: least}, capacity)
        message = "the result depends on the order of the two points: {got}, expected {want}"
        t.that(got == want, message, got=got, want=want)
    measured, fixed, _ = on_line(t)
    got = batch_of(student, t, measured, fixed * t.uniform(0.2, 0.8))
    t.that(got == 0, "not even one sample fits, so the result is 0; batch_on_line(...) is {got}", got=got)


MOST_TRIES = 1000  # more than any limit here
ENDLESS = "1000 batches were tried: the search does not end. Each try has to make the interval smaller."


def search_of(student, t, threshold: int, limit: int) -> tuple[float, list[int]]:
    """Return the student's batch if ``threshold`` is the largest that fits, and the batches that were
    tried."""
    tried: list[int] = []

    def fits(batch: Any) -> bool:
        tried.append(int(batch))
        return tried[-1] <= threshold

    asked = t.asked(fits, calls=MOST_TRIES, too_many=ENDLESS)
    return t.number(student.largest_batch(asked, limit), "largest_batch(...)"), tried


@check("search", points=2, seconds=20)
def check_search(student, t):
    "The largest batch that fits"
    for _ in range(3):
        limit = t.integer(200, 600)
        want = t.integer(40, limit - 10)
        got, _ = search_of(student, t, want, limit)
        power = 2 ** int(math.log2(want))
        message = "{got} is the last of the doubled sizes that fits; search between it and {double}."
        t.that(got != power or power == want, message, got=got, double=2 * power)
        t.that(got != want + 1, "{got} does not fit: the largest batch that fits is one smaller", got=got)
        message = "largest_batch(...) is {got}, but {want} fits and {more} does not"
        t.that(got == want, message, got=got, want=want, more=want + 1)
    got, _ = search_of(student, t, 0, limit)
    t.that(got == 0, "not even one sample fits, so the result is 0; largest_batch(...) is {got}", got=got)


@check("search", points=1, seconds=20)
def check_tries(student, t):
    "A few tries are enough"
    limit, want = t.integer(400, 800), t.integer(200, 380)
    got, tried = search_of(student, t, want, limit)
    message = "not tested yet: {got} is far from the largest batch, {want}"
    t.that(abs(got - want) < 200 and len(tried) > 0, message, got=got, want=want)
    most = 2 * math.log2(limit) + 2
    message = (
        "{tries} tries for a limit of {limit}: doubling and bisection need at most {most:.0f}, and each try "
        "costs a training step"
    )
    t.that(len(tried) <= most, message, tries=len(tried), limit=limit, most=most)


@check("search", points=1, seconds=20)
def check_limit(student, t):
    "Nothing above the limit is tried"
    limit = t.integer(70, 120)
    got, tried = search_of(student, t, 10 * limit, limit)
    largest = max(tried, default=0)
    message = "a batch of {largest} was tried: there are only {limit} samples"
    t.that(largest <= limit, message, largest=largest, limit=limit)
    message = "every batch fits here, so the largest is the limit, {limit}; largest_batch(...) is {got}"
    t.that(got == limit, message, limit=limit, got=got)


def fitted(student, t, error: Exception | None = None) -> object:
    """Return what the student's ``fits`` returns for a run that raises ``error``, or the text of what comes
    out."""
    batch, ran = t.integer(3, 99), []

    def run(size: Any) -> None:
        ran.append(size)
        if error is not None:
            raise error

    kinds = (torch.OutOfMemoryError, torch.AcceleratorError, RuntimeError, ValueError)
    try:
        found = student.fits(t.asked(run, calls=3, raises=kinds), batch)
    except NotWritten:
        raise
    except Wrong as wrong:
        found = str(wrong)
    t.that(ran == [batch], "run is called with {got}, expected one call with {batch}", got=ran, batch=batch)
    return found


@check("search", points=1, seconds=20)
def check_fits(student, t):
    "Out of memory means False, and no other error does"
    works = fitted(student, t)
    t.that(works is True, "a step that runs should give True, not {got}", got=works)
    size = t.integer(10, 99)
    too_large = fitted(student, t, torch.OutOfMemoryError(f"Tried to allocate {size} GiB"))
    t.that(too_large is False, "torch.OutOfMemoryError should give False, not {got}", got=too_large)
    message = (
        "A RuntimeError that is no torch.OutOfMemoryError was caught: a mistake in the program looks like a "
        "batch that is too large. Catch torch.OutOfMemoryError only."
    )
    illegal = f"CUDA error: an illegal memory access was encountered in block {size}"
    for error in (
        RuntimeError(f"shapes {size - 1} and {size} do not match"),
        RuntimeError(illegal),
        torch.AcceleratorError(illegal),
        RuntimeError(f"the file {size} is too large: out of memory"),
        ValueError(f"a batch of {size}"),
    ):
        got = fitted(student, t, error)
        t.that(got not in (True, False), message)
        reached = type(got) is str and str(size) in got
        t.that(reached, "another error should reach its author, but {got} came out", got=got)

"""The visible checks of PowerSGD, of the switch, of 1-bit Adam and of what pays."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import same
from dlo_lib.labkit.traffic import uses_what_arrives

from . import scenarios, twins
from .sending import same_on_all, sends_at_most

# -- 5 · PowerSGD


def low_rank_inputs(
    t, world: int, steps: int, dtype=torch.float64, shape=None
) -> tuple[Tensor, twins.Inputs]:
    """The first factor, and the gradients of each rank and step: a common part, and each rank's own."""
    rows, columns, rank = shape or (t.integer(9, 14), t.integer(6, 8), t.integer(2, 3))
    common = t.normal(rows, columns, dtype=dtype)
    inputs = [[common + t.normal(rows, columns, dtype=dtype) for _ in range(steps)] for _ in range(world)]
    return t.normal(columns, rank, dtype=dtype), inputs


def low_rank_run(student, t, q: Tensor, inputs: list[list[Tensor]]) -> Run:
    """A run with right means."""
    run = student.ranks(scenarios.low_rank_means, [{"q": q, "gradients": own} for own in inputs])
    want = twins.low_rank_means(inputs, q)
    forms = {
        "the error is not added, or not kept: M is the gradient plus the error": (False, True),
        "it does not begin with the Q of the step before (warm start)": (True, False),
        "neither the error nor the Q of the step before is used": (False, False),
    }
    known = {name: twins.low_rank_means(inputs, q, *form) for name, form in forms.items()}
    known["that is the exact mean, its rank is not {r}"] = [sum(each) / run.world for each in zip(*inputs)]
    known["the result is the sum over the ranks: Q is a mean"] = [run.world * value for value in want]
    close = {"of": lambda result: t.items(result, 2, "the result")[0], "rtol": 1e-3, "atol": 1e-3}
    same_on_all(t, run, want, "the mean of gradient {i}", known, r=q.shape[1], **close)
    return run


@check("powersgd", points=1, seconds=20)
def check_low_rank(student, t):
    "The first mean is the projection on the columns of P"
    for world, dtype in ((1, torch.float32), (t.integer(2, 4), torch.float64)):
        low_rank_run(student, t, *low_rank_inputs(t, world, 1, dtype))


@check("powersgd", points=2, seconds=20)
def check_low_rank_steps(student, t):
    "Warm start and error feedback, over several steps"
    low_rank_run(student, t, *low_rank_inputs(t, t.integer(2, 4), t.integer(4, 5)))


@check("powersgd", points=2, seconds=20)
def check_low_rank_traffic(student, t):
    "Two all-reduces, of (n + m) r elements together"
    world, steps = t.integer(3, 4), 2
    q, inputs = low_rank_inputs(t, world, steps)
    run = low_rank_run(student, t, q, inputs)
    most = steps * 2 * sum(inputs[0][0].shape) * q.shape[1] * q.itemsize * (world - 1) / world
    sends_at_most(t, run, most, "all-reduce P, then Q, and nothing else")


@check("powersgd", points=1, seconds=20)
def check_low_rank_arguments(student, t):
    "The arguments stay unchanged"
    q, inputs = low_rank_inputs(t, 2, 2)
    run = student.ranks(scenarios.low_rank_means, [{"q": q, "gradients": own} for own in inputs])
    t.that(bool(run.calls(0)), "not tested yet: the ranks send nothing, see the first checks")
    for own, result in zip(inputs, run.results):
        after = t.items(result, 2, "the result")[1]
        same(t, after, [q, *own], "argument {i} after the calls", rtol=0, atol=0)


# -- 6 · the switch


def norms_with(t, length: int, distance: int, ratio: float) -> list[float]:
    """Drawn norms; the last is ``ratio`` times the one ``distance`` steps before. Ratio 1: all are equal."""
    norms = [t.uniform(1, 9)] * length if ratio == 1 else [t.uniform(1, 9) for _ in range(length)]
    if length > distance:
        norms[-1] = ratio * norms[-1 - distance]
    return norms


def answers(student, t, cases: list[tuple], message: str) -> None:
    """A case: the expected answer, length of the norms, Δ, ratio, warm-up and threshold."""
    words = "{length} norms, Δ = {distance}, ratio {ratio:.3f}, warmup {warmup}, threshold {threshold:.3f}: "
    words += "is_stable(...) is {got}. " + message
    for want, *case in t.shuffled(cases):
        length, distance, ratio, warmup, threshold = case
        got = student.is_stable(norms_with(t, length, distance, ratio), 1 - 1 / distance, warmup, threshold)
        t.that(type(got) is bool, "is_stable(...) should be True or False, not {got}", got=got)
        where = dict(zip(("length", "distance", "ratio", "warmup", "threshold"), case))
        t.that(got is want, words, got=got, **where)


@check("switch", points=1)
def check_ratio(student, t):
    "The norm, divided by that of Δ steps before, reaches the threshold"
    cases = []
    for _ in range(4):
        distance, threshold = t.integer(4, 30), t.uniform(0.9, 0.99)
        length = distance + t.integer(2, 40)
        cases += [(True, length, distance, threshold + t.uniform(0.002, 0.1), 0, threshold)]
        cases += [(False, length, distance, threshold - t.uniform(0.002, 0.1), 0, threshold)]
    answers(student, t, cases, "Compare the last norm with the one Δ = round(1 / (1 - beta2)) steps before")


@check("switch", points=1)
def check_enough_steps(student, t):
    "It waits until step t - Δ exists"
    cases = []
    for _ in range(3):
        distance = t.integer(4, 30)
        cases += [(False, length, distance, 1.0, 0, 0.0) for length in (1, distance - 1, distance)]
        cases += [(True, distance + 1, distance, 1.0, 0, 0.96)]
    answers(student, t, cases, "Steps are counted from 1: norms[-1 - Δ] must exist")


@check("switch", points=1)
def check_waits(student, t):
    "It waits for the warm-up of the learning rate"
    cases = []
    for _ in range(3):
        distance = t.integer(4, 10)
        length = distance + t.integer(5, 20)
        lates = t.integer(1, 9), 1, 0, -t.integer(1, 4)
        cases += [(late <= 0, length, distance, 1.0, length + late, 0.96) for late in lates]
    answers(student, t, cases, "Before step `warmup` the answer is False; in this step it may be True")


# -- 7 · 1-bit Adam


STEPS = 20


def adam_case(t, world: int, late: bool = False) -> tuple[dict, list[list[Tensor]]]:
    """Arguments, and gradients that shrink at first, so that the variance is not stable at once. ``late``:
    they do not, but the warm-up of the learning rate is long."""
    size, distance = 8 * world * t.integer(1, 2), t.integer(3, 4)
    shrink, warmup = (1.0, t.integer(9, 12)) if late else (t.uniform(0.75, 0.9), t.integer(0, 3))
    inputs: list[list[Tensor]] = [[] for _ in range(world)]
    for step in range(STEPS):
        common = t.normal(size, dtype=torch.float64).sign()
        for own in inputs:
            noisy = common + 0.3 * t.normal(size, dtype=torch.float64)
            own.append(3 * shrink ** min(step, 4) * noisy)
    options = {"lr": t.uniform(0.01, 0.1), "eps": t.uniform(1e-3, 1e-2), "warmup": warmup}
    betas = (t.uniform(0.6, 0.9), 1 - 1 / distance)
    return {"x": t.normal(size, dtype=torch.float64), "betas": betas, **options}, inputs


def fitting_case(t, world: int, late: bool = False) -> tuple[dict, list[list[Tensor]]]:
    """A case in which both phases have some steps, and a switch by the wrong norm is visible."""

    def tells(case) -> bool:
        options, inputs = case
        frozen, *others = (twins.last_of_warmup(inputs, form, **options) for form in ("", "raw", "norm"))
        return 6 <= frozen <= STEPS - 5 and (late or frozen not in others)

    return t.draw_until(lambda: adam_case(t, world, late), tells)


FORMS = {
    "raw": "the rule is asked with the norm of v: take that of the corrected v, v / (1 - beta2^t)",
    "norm": "the rule is asked with the Euclidean norm: |v|_1 is the sum of the elements",
    "correction": "the correction of the frozen variance changes with the step: it is frozen too",
    "variance": "the variance changes after the switch: it is frozen",
}


def adam_run(student, t, world: int, late: bool = False, never: bool = False) -> tuple[Run, dict, int]:
    """A run with the right parameters after each step, its arguments, and the last step of the warm-up."""
    options, inputs = fitting_case(t, world, late)
    options["warmup"] = STEPS + 1 if never else options["warmup"]
    run = student.ranks(scenarios.adam_steps, [{"gradients": own, **options} for own in inputs])
    want, frozen = twins.adam_path(inputs=inputs, **options)
    paths = {
        message: twins.adam_path(inputs=inputs, form=form, **options)[0] for form, message in FORMS.items()
    }
    what = "x after step {i} (the last step of the warm-up is {frozen})"
    same_on_all(t, run, want, what, paths, of=lambda result: result[0], rtol=1e-5, atol=1e-7, frozen=frozen)
    return run, options | {"inputs": inputs}, frozen


@check("adam", points=2, seconds=20)
def check_adam(student, t):
    "Both phases, and the switch between them"
    for world in (1, t.integer(2, 4)):
        adam_run(student, t, world)


@check("adam", points=1, seconds=20)
def check_adam_warmup(student, t):
    "The switch waits for the warm-up of the learning rate"
    adam_run(student, t, t.integer(2, 3), late=True)
    run, *_ = adam_run(student, t, 2, never=True)
    uses_what_arrives(t, run, Kind.ALL_REDUCE if run.calls(0, Kind.ALL_REDUCE) else None, t.integer(0, 1))


@check("adam", points=2, seconds=20)
def check_adam_traffic(student, t):
    "One all-reduce in a step of the warm-up, then bits"
    world = t.integer(3, 4)
    run, options, frozen = adam_run(student, t, world)
    whole, compressed = options["x"].nbytes, STEPS - frozen
    exact = frozen * 2 * whole * (world - 1) / world
    bits = compressed * 2 * (world - 1) * (whole / 64 / world + 8)
    message = "one all-reduce in each step of the warm-up, and then the bits and scales of the momentum"
    # A changed number in the warm-up could let one rank switch before the others: the last one is in bits.
    sends_at_most(t, run, exact + bits, message)


@check("adam", points=1, seconds=20)
def check_adam_gradient(student, t):
    "The gradient stays unchanged"
    run, options, _ = adam_run(student, t, 2)
    for (_, after), before in zip(run.results, options["inputs"]):
        same(t, after, before, "gradient {i} after the step", rtol=0, atol=0)


# -- 8 · what pays


def seconds_of(scheme: dict, alpha: float, beta: float, backward: float) -> float:
    """The end of the later of two activities; the second begins after the first if it is not hidden."""
    begin = 0.0 if scheme["hidden"] else backward + scheme["coding"]
    return max(backward + scheme["coding"], begin + scheme["messages"] * alpha + scheme["nbytes"] * beta)


@check("pays", points=2)
def check_step_seconds(student, t):
    "The seconds of a step, overlapped or not"
    fast, slow, backward = t.uniform(1e-12, 1e-11), t.uniform(1e-8, 1e-7), t.uniform(0.1, 0.5)
    what = "step_seconds(...) with hidden = {hidden}"
    longer = "overlapped, a step takes the longer of computation and communication; if not, their sum"
    links = (1e-6, fast), (1e-6, slow), (t.uniform(1e-3, 1e-2), fast)  # the last one has a large latency
    for (alpha, beta), hidden in itertools.product(links, (True, False)):
        link = (alpha, beta, backward)
        scheme = {"messages": t.integer(2, 600), "nbytes": 1e6 * t.uniform(1, 500), "hidden": hidden}
        scheme["coding"] = t.uniform(0.01, 0.3)
        changes = {
            longer: {"hidden": not hidden},
            "coding takes seconds of the GPU: add them to backward": {"coding": 0.0},
            "the messages cost alpha each": {"messages": 0},
        }
        known = {f"{what}: {words}": seconds_of(scheme | one, *link) for words, one in changes.items()}
        got, want = student.step_seconds(scheme, *link), seconds_of(scheme, *link)
        same(t, got, want, what, known, rtol=1e-6, atol=0.0, hidden=hidden)

"""The visible checks of PowerSGD, of the switch, of 1-bit Adam and of what pays."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import near, same, wrong_if
from dlo_lib.labkit.traffic import uses_what_arrives

from . import scenarios, twins
from .sending import sends_at_most

# -- 5 · PowerSGD


@check("powersgd", points=1)
def check_orthonormal(student, t):
    "Orthonormal columns that span the same space"
    for rank in (1, t.integer(2, 4)):
        matrix = t.normal(t.integer(6, 12), rank, dtype=torch.float64) * t.uniform(2, 9)
        got = t.tensor(student.orthonormal(matrix.clone()), "orthonormal(matrix)", shape=tuple(matrix.shape))
        products = got.double().T @ got.double()
        message = "the columns of orthonormal(matrix) have lengths {lengths}: divide each by its norm"
        lengths = ", ".join(f"{float(value):.3g}" for value in products.diagonal().sqrt())
        t.that(bool((products.diagonal() - 1).abs().max() < 1e-5), message, lengths=lengths)
        message = (
            "the columns of orthonormal(matrix) are not orthogonal: subtract from each column its "
            "projections on all before it"
        )
        t.that(bool((products - torch.eye(rank, dtype=torch.float64)).abs().max() < 1e-5), message)
        left = matrix - got.double() @ (got.double().T @ matrix)
        message = "the columns of orthonormal(matrix) do not span those of the matrix"
        t.that(bool(left.norm() < 1e-5 * matrix.norm()), message)


def low_rank_inputs(t, world: int, steps: int, dtype=torch.float64) -> tuple[Tensor, list[list[Tensor]]]:
    """The first factor, and the gradients of each rank and step: a common part, and each rank's own."""
    rows, columns, rank = t.integer(9, 14), t.integer(6, 8), t.integer(2, 3)
    common = t.normal(rows, columns, dtype=dtype)
    inputs = [[common + t.normal(rows, columns, dtype=dtype) for _ in range(steps)] for _ in range(world)]
    return t.normal(columns, rank, dtype=dtype), inputs


def same_low_rank(t, results: list, q: Tensor, inputs: list[list[Tensor]], first: int = 0) -> None:
    """The means of each rank, from step ``first``, are the twin's."""
    world, exact = len(inputs), [sum(steps) / len(inputs) for steps in zip(*inputs)]
    words = "gradient {step} on rank {rank} of {world}: "
    forms = {
        "the error is not added, or not kept: M is the gradient plus the error": {"feedback": False},
        "it does not begin with the Q of the step before (warm start)": {"warm": False},
        "neither the error nor the Q of the step before is used": {"feedback": False, "warm": False},
    }
    known = {name: twins.low_rank_means(inputs, q, **form) for name, form in forms.items()}
    known |= {"that is the exact mean, its rank is not {r}": exact}
    want = twins.low_rank_means(inputs, q)
    known |= {"the result is the sum over the ranks: Q is a mean": [world * value for value in want]}
    for rank, got in enumerate(results):
        got = t.items(got, len(want) - first, "the means of rank {rank}", rank=rank)
        for step, mine in enumerate(got, start=first):
            mine = t.tensor(
                mine,
                "the mean of gradient {step} on rank {rank} of {world}",
                shape=tuple(want[step].shape),
                rank=rank,
                step=step,
                world=world,
            )
            where = {"rank": rank, "step": step, "world": world, "r": q.shape[1]}
            mistakes = {words + name: values[step] for name, values in known.items()}
            wrong_if(t, mine.double(), want[step], mistakes, rtol=1e-3, atol=1e-3, **where)
            t.close(
                mine.double(),
                want[step],
                "the mean of gradient {step} on rank {rank} of {world}",
                rtol=1e-3,
                atol=1e-3,
                **where,
            )


def low_rank_run(student, t, world: int, steps: int, dtype=torch.float64) -> tuple[Run, Tensor]:
    """A run with right means, and the first factor."""
    q, inputs = low_rank_inputs(t, world, steps, dtype)
    run = student.ranks(scenarios.low_rank_means, [{"q": q, "gradients": own} for own in inputs])
    same_low_rank(t, run.results, q, inputs)
    return run, q


@check("powersgd", points=1, seconds=20)
def check_low_rank(student, t):
    "The first mean is the projection on the columns of P"
    for world, dtype in ((1, torch.float32), (t.integer(2, 4), torch.float64)):
        low_rank_run(student, t, world, 1, dtype)


@check("powersgd", points=2, seconds=20)
def check_low_rank_steps(student, t):
    "Warm start and error feedback, over several steps"
    low_rank_run(student, t, t.integer(2, 4), t.integer(4, 5))


@check("powersgd", points=2, seconds=20)
def check_low_rank_traffic(student, t):
    "Two all-reduces, of (n + m) r elements together"
    world, steps = t.integer(3, 4), 2
    run, q = low_rank_run(student, t, world, steps)
    rows = run.results[0][0].shape[0]
    most = steps * 2 * (rows + q.shape[0]) * q.shape[1] * q.itemsize * (world - 1) / world
    sends_at_most(t, run, most, "all-reduce P, then Q, and nothing else")
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, world - 1))


@check("powersgd", points=1, seconds=20)
def check_low_rank_arguments(student, t):
    "The arguments stay unchanged"
    q, inputs = low_rank_inputs(t, 2, 2)
    run = student.ranks(scenarios.low_rank_arguments, [{"q": q, "gradients": own} for own in inputs])
    t.that(bool(run.calls(0)), "not tested yet: the ranks send nothing, see the first checks")
    for rank, result in enumerate(run.results):
        after = t.items(result, 2, "the result of rank {rank}", rank=rank)[1]
        same(t, after, [q, *inputs[rank]], "argument {i} after the calls", rtol=0, atol=0)


@check("powersgd", points=1, seconds=20)
def check_low_rank_resumed(student, t):
    "A resumed run continues"
    world, stop = 2, t.integer(2, 3)
    q, inputs = low_rank_inputs(t, world, 5)
    first = [{"q": q, "gradients": own[:stop]} for own in inputs]
    saved = [
        t.items(result, 2, "the result") for result in student.ranks(scenarios.low_rank_saved, first).results
    ]
    other = torch.flip(q, (0,))  # the argument of the resumed run: the state replaces it
    second = [{"q": other, "gradients": own[stop:], "state": state} for own, (_, state) in zip(inputs, saved)]
    resumed = student.ranks(scenarios.low_rank_again, second).results
    same_low_rank(t, [before for before, _ in saved], q, [own[:stop] for own in inputs])
    try_words = "the run was saved after {stop} gradients and resumed: state_dict needs the error and Q"
    want = twins.low_rank_means(inputs, q)[stop:]
    for rank, got in enumerate(resumed):
        for mine, right in zip(t.items(got, 5 - stop, "the means"), want):
            mine = t.tensor(mine, "a mean", shape=tuple(right.shape))
            t.that(
                bool((mine - right).norm() <= 1e-3 * right.norm()),
                try_words + " (rank {rank})",
                stop=stop,
                rank=rank,
            )


# -- 6 · the switch


def norms_with(t, length: int, distance: int, ratio: float) -> list[float]:
    """Drawn norms, of which the last is ``ratio`` times the one ``distance`` steps before; with a ratio of 1
    all are equal.
    """
    norms = [t.uniform(1, 9)] * length if ratio == 1 else [t.uniform(1, 9) for _ in range(length)]
    if length > distance:
        norms[-1] = ratio * norms[-1 - distance]
    return norms


def answers(student, t, cases: list[tuple], message: str) -> None:
    """A case: the expected answer, length of the norms, Δ, ratio, warm-up and threshold."""
    for want, length, distance, ratio, warmup, threshold in t.shuffled(cases):
        norms, beta2 = norms_with(t, length, distance, ratio), 1 - 1 / distance
        got = student.is_stable(norms, beta2, warmup, threshold)
        t.that(type(got) is bool, "is_stable(...) should be True or False, not {got}", got=got)
        where = {
            "length": length,
            "distance": distance,
            "ratio": ratio,
            "warmup": warmup,
            "threshold": threshold,
        }
        call = (
            "{length} norms, Δ = {distance}, ratio {ratio:.3f}, warmup {warmup}, threshold {threshold:.3f}: "
        )
        t.that(got is want, call + "is_stable(...) is {got}. " + message, got=got, **where)


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
        cases += [
            (False, length, distance, 1.0, length + t.integer(1, 9), 0.96),
            (False, length, distance, 1.0, length + 1, 0.96),
        ]
        cases += [
            (True, length, distance, 1.0, length, 0.96),
            (True, length, distance, 1.0, length - t.integer(1, 4), 0.96),
        ]
    answers(student, t, cases, "Before step `warmup` the answer is False; in this step it may be True")


# -- 7 · 1-bit Adam


STEPS = 20


def adam_case(t, world: int, late: bool = False) -> tuple[dict, list[list[Tensor]]]:
    """The arguments, and the gradients of each rank and step. They shrink at first, so that the variance
    is not stable at once.

    ``late``: they do not, but the warm-up of the learning rate is long.
    """
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


ADAM_MISTAKES = {
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
    known = {
        message: twins.adam_path(inputs=inputs, mistake=name, **options)[0]
        for name, message in ADAM_MISTAKES.items()
    }
    for rank, result in enumerate(run.results):
        got = t.items(result, len(want), "the parameters of rank {rank}", rank=rank)
        where = {"rank": rank, "frozen": frozen, "world": world}
        for message, path in known.items():
            visible = not near(want, path, rtol=1e-6)  # the mistake changes nothing in some cases
            followed = visible and near(got, path, rtol=1e-6)
            t.that(not followed, message)
        for step, (mine, right) in enumerate(zip(got, want), start=1):
            phase = "of the warm-up" if step <= frozen else "of the compressed phase"
            what = (
                "x after step {step} on rank {rank} of {world}, a step {phase} (the last one of the warm-up "
                "is {frozen}),"
            )
            t.close(mine, right, what, rtol=1e-5, atol=1e-7, step=step, phase=phase, **where)
    return run, options, frozen


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
    sends_at_most(t, run, exact + bits, message)
    # In the warm-up, a changed number could let one rank switch before the others: see the check before.
    uses_what_arrives(t, run, None, t.integer(0, world - 1))


@check("adam", points=1, seconds=20)
def check_adam_gradient(student, t):
    "The gradient stays unchanged"
    options, inputs = fitting_case(t, 2)
    run = student.ranks(scenarios.adam_arguments, [{"gradients": own, **options} for own in inputs])
    want = twins.adam_path(inputs=inputs, **options)[0][-1]
    for rank, result in enumerate(run.results):
        x, after = t.items(result, 2, "the result of rank {rank}", rank=rank)
        t.that(
            near(x, want, rtol=1e-4), "not tested yet: `x` after the last step is wrong, see the first check"
        )
        same(t, after, inputs[rank], "gradient {i} after the step", rtol=0, atol=0)


# -- 8 · what pays


def drawn_scheme(t, hidden: bool) -> dict:
    return {
        "messages": t.integer(2, 600),
        "nbytes": 1e6 * t.uniform(1, 500),
        "coding": t.uniform(0.01, 0.3),
        "hidden": hidden,
    }


def seconds_of(scheme: dict, alpha: float, beta: float, backward: float) -> float:
    """The end of the later of two activities; the second begins after the first if it is not hidden."""
    begin = 0.0 if scheme["hidden"] else backward + scheme["coding"]
    return max(backward + scheme["coding"], begin + scheme["messages"] * alpha + scheme["nbytes"] * beta)


def links_of(t) -> list[tuple[float, float, float]]:
    """α, β and backward: a fast link, a slow one, and one with a large latency."""
    backward = t.uniform(0.1, 0.5)
    fast, slow = t.uniform(1e-12, 1e-11), t.uniform(1e-8, 1e-7)
    return [(1e-6, fast, backward), (1e-6, slow, backward), (t.uniform(1e-3, 1e-2), fast, backward)]


@check("pays", points=2)
def check_step_seconds(student, t):
    "The seconds of a step, overlapped or not"
    for link in links_of(t):
        for hidden in (True, False):
            scheme = drawn_scheme(t, hidden)
            got, want = (
                t.number(student.step_seconds(scheme, *link), "step_seconds(...)"),
                seconds_of(scheme, *link),
            )
            other = seconds_of({**scheme, "hidden": not hidden}, *link)
            free = seconds_of({**scheme, "coding": 0.0}, *link)
            known = {
                "hidden = {hidden}: overlapped, a step takes the longer of computation and communication; if "
                "not, their sum": other,
                "coding takes seconds of the GPU: add them to backward": free,
                "hidden = {hidden}: the messages cost alpha each": seconds_of(
                    {**scheme, "messages": 0}, *link
                ),
            }
            wrong_if(t, got, want, known, rtol=1e-6, atol=0.0, hidden=hidden)
            t.close(got, want, "step_seconds(...) with hidden = {hidden}", rtol=1e-6, atol=0.0, hidden=hidden)


@check("pays", points=1)
def check_fastest(student, t):
    "The fastest scheme of each link"
    for number, link in enumerate(links_of(t)):

        def draw() -> dict[str, dict]:
            names = t.shuffled(["exact", "fp16", "low rank", "bits"])
            return {name: drawn_scheme(t, t.choice([True, False])) for name in names}

        def tells(schemes: dict[str, dict], link=link, number=number) -> bool:
            best, second, *_ = sorted(schemes, key=lambda name: seconds_of(schemes[name], *link))
            hidden = {name: seconds_of({**scheme, "hidden": True}, *link) for name, scheme in schemes.items()}
            clear = seconds_of(schemes[second], *link) > 1.001 * seconds_of(schemes[best], *link)
            return clear and (number == 0 or min(hidden, key=hidden.__getitem__) != best)

        schemes = t.draw_until(draw, tells)
        want = min(schemes, key=lambda name: seconds_of(schemes[name], *link))
        got = student.fastest(schemes, *link)
        fewest = min(schemes, key=lambda name: schemes[name]["nbytes"])
        message = "fastest(...) is {got}, the scheme with the fewest bytes: {want} has the shortest step"
        t.that(want == fewest or got != fewest, message, got=got, want=want)
        t.equal(got, want, "the name of the fastest scheme")


@check("pays", points=1)
def check_equal_schemes(student, t):
    "Of several equal schemes, the first"
    for link in links_of(t):
        scheme = drawn_scheme(t, t.choice([True, False]))
        slower = {**scheme, "coding": scheme["coding"] + 1.0, "nbytes": 2 * scheme["nbytes"]}
        names = t.shuffled(["exact", "fp16", "low rank", "bits"])
        order = t.choice(
            [
                (slower, scheme, scheme, slower),
                (scheme, slower, scheme, slower),
                (slower, slower, scheme, scheme),
            ]
        )
        schemes = dict(zip(names, order))
        t.equal(student.fastest(schemes, *link), names[order.index(scheme)], "the first of two equal schemes")

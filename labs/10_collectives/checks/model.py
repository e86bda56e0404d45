"""The visible checks of the cost model, the fit and the crossover."""

from __future__ import annotations

import math

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import wrong_if

from .twins import seconds


def link(t) -> tuple[float, float]:
    return t.uniform(1e-6, 1e-4), t.uniform(1e-10, 1e-8)


def same_cost(student, t, algorithm: str, ranks: int, message: str) -> None:
    alpha, beta = link(t)
    size = 1000 * t.integer(1, 5000)
    got = t.number(student.predicted_seconds(algorithm, size, ranks, alpha, beta), "predicted_seconds(...)")
    want = seconds(algorithm, size, ranks, alpha, beta)
    call = 'predicted_seconds("{algorithm}") on {ranks} ranks: '
    known = {}
    if algorithm == "ring":
        whole = seconds("ring", size * ranks, ranks, alpha, beta)
        known[call + "each message of the ring carries a chunk of B / N bytes, not the whole tensor"] = whole
    else:
        complete, one_round = 2 ** int(math.log2(ranks)), seconds("tree", size, 2, alpha, beta)
        known[call + "an incomplete round counts as a round: round log2 N up, not down"] = seconds("tree", size, complete, alpha, beta)
        known[call + "there is no fraction of a round: round log2 N up"] = math.log2(ranks) * one_round
        known[call + "the messages of one round travel at the same time and count once"] = (ranks - 1) * one_round
        known[call + "each message of the tree carries the whole tensor, not a chunk"] = seconds("tree", size / ranks, ranks, alpha, beta)
    known[call + "that is one half of the all-reduce, the other half is missing"] = want / 2
    wrong_if(t, got, want, known, atol=0.0, algorithm=algorithm, ranks=ranks)
    t.that(
        bool(abs(got - want) <= 1e-6 * want),
        'predicted_seconds("{algorithm}") of {size} bytes on {ranks} ranks is {got:.4g} s, but the rounds take {want:.4g} s: ' + message,
        algorithm=algorithm, size=size, ranks=ranks, got=got, want=want,
    )  # fmt: skip


@check("cost", points=2)
def check_ring_cost(student, t):
    "The ring: 2 (N-1) messages of B / N bytes"
    for ranks in (1, 2, 5, t.integer(6, 40)):
        same_cost(student, t, "ring", ranks, "2 (N-1) messages, each with a chunk")


@check("cost", points=1)
def check_tree_cost(student, t):
    "The tree on a power of two"
    for ranks in (1, 2, 8, 2 ** t.integer(4, 7)):
        same_cost(student, t, "tree", ranks, "a reduce and a broadcast, each with the whole tensor in every round")


@check("cost", points=1)
def check_tree_rounds(student, t):
    "The tree on numbers of ranks that are not powers of two"
    for ranks in (3, 5, 2 ** t.integer(3, 6) + 1):
        same_cost(student, t, "tree", ranks, "an incomplete round counts as a round: round log2 N up")


def timings(t, alpha: float, beta: float, noise: float) -> list[tuple]:
    """(algorithm, bytes, ranks, seconds), from 16 bytes to 16 MB. All times of the largest tensor are too long, or all are too short, so
    that the latency of a fit with absolute errors is wrong for every seed."""
    powers, of_largest = range(2, 13), t.choice([-noise, noise])
    cases = [(algorithm, 4**power, ranks) for algorithm in ("ring", "tree") for power in powers for ranks in (2, 4)]
    errors = [of_largest if size == 4 ** powers[-1] else t.uniform(-noise, noise) for _, size, _ in cases]
    return [(*case, seconds(*case, alpha, beta) * (1 + error)) for case, error in zip(cases, errors)]


def fitted(student, t, alpha: float, beta: float, noise: float) -> list[float]:
    """The student's fit to timings of this link: two numbers."""
    got = t.items(student.fit_link(timings(t, alpha, beta, noise)), 2, "fit_link(timings)")
    return [t.number(value, "{name} of the fit", name=name) for name, value in zip(("alpha", "beta"), got)]


@check("fit", points=2)
def check_fit(student, t):
    "Timings without noise give the exact α and β"
    alpha, beta = link(t)
    got = fitted(student, t, alpha, beta, 0.0)
    known = {
        "the two numbers are exchanged: return α first, then β": [beta, alpha],
        "the second number is the bandwidth 1/β: return β, in seconds per byte": [alpha, 1 / beta],
    }
    wrong_if(t, got, [alpha, beta], known, rtol=1e-3, atol=0.0)
    for name, value, want in zip(("alpha", "beta"), got, (alpha, beta)):
        t.close(value, want, "{name} of the fit", name=name, rtol=1e-3, atol=0.0)


@check("fit", points=1)
def check_noise(student, t):
    "Noise on large tensors does not hide the latency"
    alpha, beta = t.uniform(1.5e-5, 3e-5), t.uniform(2e-9, 1e-8)
    got = fitted(student, t, alpha, beta, 0.1)
    message = (
        "the timings have noise of 10 %. The latency of the fit is {got:.3g} s, expected {want:.3g} s within 15 %: divide each equation by its time, "
        "or the noise of the largest times outweighs all small ones"
    )
    t.that(bool(abs(got[0] - alpha) < 0.15 * alpha), message, got=got[0], want=alpha)
    message = "the timings have noise of 10 %. β of the fit is {got:.3g} seconds per byte, expected {want:.3g} within 15 %"
    t.that(bool(abs(got[1] - beta) < 0.15 * beta), message, got=got[1], want=beta)


@check("fit", points=1)
def check_all_timings(student, t):
    "Every timing counts"
    rows = timings(t, *link(t), 0.0)  # without noise every fit that uses all timings is right

    def fit(rows: list[tuple]) -> list[float]:
        return [t.number(value, "a number of the fit") for value in t.items(student.fit_link(rows), 2, "fit_link(timings)")]

    before = fit(rows)
    t.that(all(value > 0 for value in before), "not tested yet: the fit has a number that is not positive, see the first check")
    for number in t.integers(0, len(rows) - 1, 3).tolist():
        algorithm, size, ranks, time = rows[number]
        changed = fit([*rows[:number], (algorithm, size, ranks, 1.5 * time), *rows[number + 1 :]])
        message = "timing {number} of {count} ({algorithm}, {size} bytes) was changed, and the fit is the same: use all timings"
        t.that(changed != before, message, number=number + 1, count=len(rows), algorithm=algorithm, size=size)


@check("crossover", points=2)
def check_crossover(student, t):
    "At the crossover ring and tree cost the same"
    for ranks in (4, 8, t.integer(9, 60)):
        alpha, beta = link(t)

        def costs(size: float, ranks: int = ranks, alpha: float = alpha, beta: float = beta) -> tuple[float, float, bool]:
            """Of the ring and of the tree, and whether they are the same."""
            ring, tree = (seconds(algorithm, size, ranks, alpha, beta) for algorithm in ("ring", "tree"))
            return ring, tree, bool(size > 0 and abs(ring - tree) <= 1e-6 * tree)

        size = t.number(student.crossover_bytes(ranks, alpha, beta), "crossover_bytes(...)")
        ring, tree, equal = costs(size)
        t.that(
            equal or not costs(size * ranks)[2],
            "on {ranks} ranks, {size:.0f} bytes are a chunk of the tensor at the crossover: return the bytes of the tensor",
            ranks=ranks, size=size,
        )  # fmt: skip
        t.that(
            equal,
            "on {ranks} ranks, {size:.0f} bytes take {ring:.4g} s with the ring, {tree:.4g} s with the tree: set the costs equal, solve for B",
            ranks=ranks, size=size, ring=ring, tree=tree,
        )  # fmt: skip


@check("crossover", points=1)
def check_no_crossover(student, t):
    "Two and three ranks: the ring is never slower"
    message = "not tested yet: with 8 ranks there is a crossover, a number of bytes, see the first check"
    t.that(type(student.crossover_bytes(8, *link(t))) is float, message)
    for ranks in (2, 3):
        alpha, beta = link(t)
        got = student.crossover_bytes(ranks, alpha, beta)
        t.equal(got, None, "the crossover of {ranks} ranks, where the tree saves no message,", ranks=ranks)

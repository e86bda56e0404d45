"""The visible checks of the cost model, the fit and the crossover."""

from __future__ import annotations

import math

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import wrong_if

from .cases import least_squares, seconds

FIT_ERROR = 1e-4  # relative: a fit in float32 has 1e-6


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
        known[call + "an incomplete round counts as a round: round log2 N up, not down"] = seconds(
            "tree", size, complete, alpha, beta
        )
        known[call + "there is no fraction of a round: round log2 N up"] = math.log2(ranks) * one_round
        known[call + "the messages of one round travel at the same time and count once"] = (
            ranks - 1
        ) * one_round
        known[call + "each message of the tree carries the whole tensor, not a chunk"] = seconds(
            "tree", size / ranks, ranks, alpha, beta
        )
    known[call + "that is one half of the all-reduce, the other half is missing"] = want / 2
    known[call + "beta is a time per byte, in seconds: multiply the bytes by it"] = seconds(
        algorithm, size, ranks, alpha, 1 / beta
    )
    wrong_if(t, got, want, known, atol=0.0, algorithm=algorithm, ranks=ranks)
    t.that(
        bool(abs(got - want) <= 1e-6 * want),
        'predicted_seconds("{algorithm}") of {size} bytes on {ranks} ranks is {got:.4g} s, but the rounds '
        "take {want:.4g} s: " + message,
        algorithm=algorithm,
        size=size,
        ranks=ranks,
        got=got,
        want=want,
    )


@check("cost", points=2)
def check_ring_cost(student, t):
    "The ring: 2 (N-1) messages of B / N bytes"
    for ranks in (*range(1, 10), t.integer(10, 1000)):
        same_cost(student, t, "ring", ranks, "2 (N-1) messages, each with a chunk")


@check("cost", points=1)
def check_tree_cost(student, t):
    "The tree on a power of two"
    for ranks in (1, 2, 4, 8, 2 ** t.integer(4, 10)):
        same_cost(
            student, t, "tree", ranks, "a reduce and a broadcast, each with the whole tensor in every round"
        )


@check("cost", points=1)
def check_tree_rounds(student, t):
    "The tree on numbers of ranks that are not powers of two"
    power = 2 ** t.integer(4, 8)
    # 5 ranks first, because on 3 ranks a round too few looks like a missing half
    for ranks in (5, 6, 7, 3, *range(9, 16), power + 1, t.integer(power + 2, 2 * power - 2), 2 * power - 1):
        same_cost(student, t, "tree", ranks, "a reduce and a broadcast of log2 N rounds each, rounded up")


POWERS = range(2, 13)  # of 4 bytes: from 16 bytes to 16 MB


def measured_cases(t) -> list[tuple[str, int, int]]:
    """(algorithm, bytes, ranks)."""
    worlds = (2, t.integer(3, 9))
    return [
        (algorithm, 4**power, ranks) for algorithm in ("ring", "tree") for power in POWERS for ranks in worlds
    ]


def timings(t, alpha: float, beta: float, noise: float) -> list[tuple]:
    """(algorithm, bytes, ranks, seconds). All times of the largest tensor are too long, or all are too short,
    so that the latency of a fit with absolute errors is wrong for every seed."""
    of_largest, cases = t.choice([-noise, noise]), measured_cases(t)
    errors = [of_largest if size == 4 ** POWERS[-1] else t.uniform(-noise, noise) for _, size, _ in cases]
    return [(*case, seconds(*case, alpha, beta) * (1 + error)) for case, error in zip(cases, errors)]


def noisy_timings(t) -> list[tuple]:
    """(algorithm, bytes, ranks, seconds), each between 15 and 30 % too long or too short."""
    alpha, beta = link(t)
    return [
        (*case, seconds(*case, alpha, beta) * (1 + t.choice([-1, 1]) * t.uniform(0.15, 0.3)))
        for case in measured_cases(t)
    ]


def fitted(student, t, rows: list[tuple]) -> list[float]:
    """The student's fit to timings: two numbers."""
    got = t.items(student.fit_link(rows), 2, "fit_link(timings)")
    return [t.number(value, "{name} of the fit", name=name) for name, value in zip(("alpha", "beta"), got)]


@check("fit", points=2)
def check_fit(student, t):
    "Timings without noise give the exact α and β"
    alpha, beta = link(t)
    got = fitted(student, t, timings(t, alpha, beta, 0.0))
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
    got = fitted(student, t, timings(t, alpha, beta, 0.1))
    message = (
        "the timings have noise of 10 %. The latency of the fit is {got:.3g} s, expected {want:.3g} s "
        "within 15 %: divide each equation by its time, or the noise of the largest times outweighs all "
        "small ones"
    )
    t.that(bool(abs(got[0] - alpha) < 0.15 * alpha), message, got=got[0], want=alpha)
    message = (
        "the timings have noise of 10 %. β of the fit is {got:.3g} seconds per byte, expected {want:.3g} "
        "within 15 %"
    )
    t.that(bool(abs(got[1] - beta) < 0.15 * beta), message, got=got[1], want=beta)


def each_counts(rows: list[tuple]) -> bool:
    """Whether the fit is another one without any single timing."""
    best = least_squares(rows)
    others = [least_squares(rows[:number] + rows[number + 1 :]) for number in range(len(rows))]
    distances = [max(abs(one / right - 1) for one, right in zip(other, best)) for other in others]
    return min(distances) > 20 * FIT_ERROR


@check("fit", points=1)
def check_all_timings(student, t):
    "Every timing counts: it is the best fit to all of them"
    rows = t.draw_until(lambda: noisy_timings(t), each_counts)
    got, want = fitted(student, t, rows), least_squares(rows)
    for number, row in enumerate(rows):
        message = (
            "the fit is the one without timing {number} of {count} ({algorithm}, {size} bytes): use all "
            "timings"
        )
        without = {message: least_squares(rows[:number] + rows[number + 1 :])}
        values = {"number": number + 1, "count": len(rows), "algorithm": row[0], "size": row[1]}
        wrong_if(t, got, want, without, rtol=FIT_ERROR, atol=0.0, **values)
    message = (
        "the timings have noise of 15 to 30 %. {name} of the fit is {got:.5g}, that of the best fit to all "
        "timings is {want:.5g}: the sum of the squares of the relative errors is smallest there"
    )
    for name, value, right in zip(("α", "β"), got, want):
        t.that(bool(abs(value - right) <= FIT_ERROR * right), message, name=name, got=value, want=right)


@check("crossover", points=2)
def check_crossover(student, t):
    "At the crossover ring and tree cost the same"
    for ranks in (*range(4, 9), t.integer(9, 60)):
        alpha, beta = link(t)

        def costs(
            size: float, ranks: int = ranks, alpha: float = alpha, beta: float = beta
        ) -> tuple[float, float, bool]:
            """Of the ring and of the tree, and whether they are the same."""
            ring, tree = (seconds(algorithm, size, ranks, alpha, beta) for algorithm in ("ring", "tree"))
            return ring, tree, bool(size > 0 and abs(ring - tree) <= 1e-6 * tree)

        size = t.number(student.crossover_bytes(ranks, alpha, beta), "crossover_bytes(...)")
        ring, tree, equal = costs(size)
        message = (
            "on {ranks} ranks, {size:.0f} bytes are a chunk of the tensor at the crossover: return the "
            "bytes of the tensor"
        )
        t.that(equal or not costs(size * ranks)[2], message, ranks=ranks, size=size)
        message = (
            "on {ranks} ranks, {size:.0f} bytes take {ring:.4g} s with the ring, {tree:.4g} s with the "
            "tree: set the costs equal, solve for B"
        )
        t.that(equal, message, ranks=ranks, size=size, ring=ring, tree=tree)


@check("crossover", points=1)
def check_no_crossover(student, t):
    "One, two and three ranks: the ring is never slower"
    message = (
        "not tested yet: with {ranks} ranks ring and tree do not cost the same at this number of bytes, see "
        "the first check"
    )
    for ranks in (4, t.integer(5, 60)):
        alpha, beta = link(t)
        size = t.number(student.crossover_bytes(ranks, alpha, beta), "crossover_bytes(...)")
        ring, tree = (seconds(algorithm, size, ranks, alpha, beta) for algorithm in ("ring", "tree"))
        t.that(bool(abs(ring - tree) <= 1e-6 * tree), message, ranks=ranks)
    for ranks in (2, 3, 1):
        alpha, beta = link(t)
        got = student.crossover_bytes(ranks, alpha, beta)
        t.equal(got, None, "the crossover of {ranks} ranks, where the tree saves no message,", ranks=ranks)

"""The visible checks of what limits a step: Amdahl's law, the overlap of tracks, FLOPs and the roofline."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import near, wrong_if

from .scenarios import overlap_of, predicted_of
from .twins import flops_of, runs_of, ticks

# -- 5 · amdahl


def amdahl_case(t) -> dict[str, float]:
    return {name: t.uniform(1.0, 20.0) for name in ("load", "forward", "backward", "other")}


def predicted(student, t, times: dict[str, float], faster: dict[str, float]) -> float:
    return t.number(student.predicted_step(times, faster), "predicted_step(...)")


@check("amdahl", points=1)
def check_divided(student, t):
    "Each part is divided by its factor"
    times, factors = amdahl_case(t), {"load": t.uniform(2.0, 6.0), "backward": t.uniform(1.5, 3.0)}
    found, after = t.items(student.run(predicted_of, times=times, faster=factors), 2, "the result")
    got, total = t.number(found, "predicted_step(...)"), sum(times.values())
    want = total - sum(times[name] - times[name] / factor for name, factor in factors.items())
    mistakes = {
        "The parts that are not in `faster` are missing: they stay as they are.": sum(times[name] / factors[name] for name in factors),
        "The times are multiplied by the factors: a part that is twice as fast takes half of the time.": total
        + sum(times[name] * (factors[name] - 1) for name in factors),
        "The whole step is divided by the factors: only their parts shrink.": total / factors["load"] / factors["backward"],
        "This is how many times as fast the step is: return its ms.": total / want,
    }
    wrong_if(t, got, want, mistakes)
    t.that(near(got, want), "the new step takes {got:.3f} ms, expected {want:.3f}", got=got, want=want)
    message = "predicted_step has changed the dict `times` that it was given, and the caller still uses it: divide without an assignment to times[name]"
    t.that(after == times, message)


@check("amdahl", points=1)
def check_removed(student, t):
    "An infinite factor removes a part"
    times = amdahl_case(t)
    got = predicted(student, t, times, {"forward": float("inf")})
    message = "without forward the step takes {got:.3f} ms, expected {want:.3f}"
    t.that(near(got, sum(times.values()) - times["forward"]), message, got=got, want=sum(times.values()) - times["forward"])
    same = predicted(student, t, times, {})
    t.that(
        near(same, sum(times.values())),
        "without a faster part the step takes {got:.3f} ms, expected {want:.3f}",
        got=same,
        want=sum(times.values()),
    )


# -- 9 · overlap


def intervals(t, count: int, start: int = 0) -> list[tuple[float, float]]:
    """Draw intervals in any order, whose ends are quarters; some contain others, and some touch."""
    found = []
    for _ in range(count):
        begin = start + t.integer(0, 60) / 4
        found.append((begin, begin + t.integer(1, 16) / 4))
    begin, end = found[0]
    found += [(end, end + 1.0), (begin + 0.25 * (end - begin > 0.25), end), (40.0 + start, 41.5 + start)]
    return t.shuffled(found)


def length(*lists: list[tuple[float, float]]) -> float:
    both = set.intersection(*(ticks(each) for each in lists))
    return len(both) / 4


def in_order(case: list[tuple[float, float]]) -> float:
    """What the loop over the intervals finds if they are not sorted."""
    total, reached = 0.0, float("-inf")
    for begin, end in case:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@check("overlap", points=2)
def check_covered(student, t):
    "The length of a union"

    def tells(case: list[tuple[float, float]]) -> bool:
        lengths = sum(end - begin for begin, end in case)
        last = 0.0
        reached = float("-inf")
        for begin, end in sorted(case):
            last += max(0.0, end - max(begin, reached))
            reached = end
        others = {lengths, last, in_order(case), max(e for _, e in case) - min(b for b, _ in case)}
        return len({lengths, last, length(case)}) == 3 and length(case) not in others

    for _ in range(2):
        case = t.draw_until(lambda: intervals(t, t.integer(6, 9)), tells)
        got, want = t.number(student.covered(case), "covered(...)"), length(case)
        last, reached = 0.0, float("-inf")
        for begin, end in sorted(case):
            last += max(0.0, end - max(begin, reached))
            reached = end
        begin, end = runs_of(case)[-1]
        mistakes = {
            "The intervals are taken in the order of the list: sort them by their begin first.": in_order(case),
            "The last run of intervals is missing: add it after the loop.": want - (end - begin),
            "The lengths are added: where intervals overlap, the time counts once.": sum(end - begin for begin, end in case),
            "This is the time from the first begin to the last end: the gaps do not count.": max(e for _, e in case)
            - min(b for b, _ in case),
            "An interval that ends within an earlier one moves the end back: keep the larger end.": last,
        }
        wrong_if(t, got, want, mistakes)
        t.that(near(got, want), "the intervals cover {got} ms, expected {want}", got=got, want=want)


@check("overlap", points=2)
def check_overlap(student, t):
    "The time in which both are active"

    def tells(pair: tuple[list[tuple[float, float]], list[tuple[float, float]]]) -> bool:
        a, b = pair
        pairs = sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one in a for two in b)
        return length(a, b) not in (0.0, pairs)

    for _ in range(2):
        a, b = t.draw_until(lambda: (intervals(t, t.integer(3, 5)), intervals(t, t.integer(3, 5), start=4)), tells)
        found, *after = t.items(student.run(overlap_of, a=a, b=b), 3, "the result")
        got, want = t.number(found, "overlap(...)"), length(a, b)
        mistakes = {
            "The overlaps of all pairs are added: where two intervals of the same list overlap, the time counts once.": sum(
                max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one in a for two in b
            ),
            "This is the union of both: the overlap is what the sum of both lengths counts twice.": length([*a, *b]),
            "The lengths of the intervals are added without `covered`: within a list they overlap, too.": sum(
                end - begin for begin, end in [*a, *b]
            )
            - length([*a, *b]),
        }
        wrong_if(t, got, want, mistakes)
        t.that(near(got, want), "both are active for {got} ms, expected {want}", got=got, want=want)
        message = (
            "overlap has changed a list that it was given, and the caller still uses it: `a += b` works in place, [*a, *b] is a new list"
        )
        t.that(all(near(mine, given) for mine, given in zip(after, (a, b))), message)


# -- 10 · flops, 11 · roofline


@check("flops", points=2)
def check_flops(student, t):
    "The FLOPs of a training step"
    for _ in range(2):
        sizes, batch = [t.integer(3, 40) for _ in range(t.integer(3, 5))], t.integer(2, 50)
        got = t.number(student.step_flops(sizes, batch), "step_flops(...)")
        mistakes = {
            "This is the forward alone: backward has the gradients of the weights, and of the inputs.": flops_of(sizes, batch, (1, 1)),
            "The first layer needs no gradient of its input: nothing asks for the gradient of the images.": flops_of(sizes, batch, (3, 3)),
            "The gradient of the weights, or of the inputs, is missing: a layer has three products, the first one two.": flops_of(
                sizes, batch, (1, 2)
            ),
            "A multiplication and an addition are two FLOPs: a product takes 2·m·k·n.": flops_of(sizes, batch) // 2,
            "The batch is missing: the first matrix of each product has a row for each image.": flops_of(sizes, 1),
            "The last layer has fewer products, not the first one.": flops_of(sizes[::-1], batch),
        }
        wrong_if(t, got, flops_of(sizes, batch), mistakes, rtol=0, atol=0)
        message = "{sizes} with a batch of {batch} takes {got} FLOPs, expected {want}"
        t.that(got == flops_of(sizes, batch), message, sizes=sizes, batch=batch, got=got, want=flops_of(sizes, batch))


@check("flops", points=1)
def check_mfu(student, t):
    "The share of the peak"
    flops, seconds = t.uniform(1e9, 5e9), t.uniform(0.01, 0.05)
    peak = flops / seconds * t.uniform(1.5, 4.0)
    got, want = t.number(student.mfu(flops, seconds, peak), "mfu(...)"), flops / (seconds * peak)
    mistakes = {
        "This is the inverse: the share of the peak is at most 1.": 1 / want,
        "This is a percentage: return the share, at most 1.": 100 * want,
        "The FLOPs are multiplied by the seconds: the rate is FLOPs divided by seconds.": flops * seconds / peak,
        "This is the rate in FLOP/s: divide it by the peak.": flops / seconds,
    }
    wrong_if(t, got, want, mistakes)
    t.that(near(got, want), "the MFU is {got:.4f}, expected {want:.4f}", got=got, want=want)


def roof_case(t, memory: bool) -> tuple[float, float, float, float]:
    peak, bandwidth, nbytes = t.uniform(5e10, 2e11), t.uniform(5e9, 2e10), t.uniform(1e6, 1e8)
    ridge = peak / bandwidth
    return nbytes * ridge * (t.uniform(0.05, 0.5) if memory else t.uniform(2.0, 9.0)), nbytes, peak, bandwidth


@check("roofline", points=1)
def check_memory_bound(student, t):
    "Below the ridge, memory is the limit"
    flops, nbytes, peak, bandwidth = roof_case(t, memory=True)
    got, want = t.number(student.attainable(flops, nbytes, peak, bandwidth), "attainable(...)"), bandwidth / (nbytes / flops)
    mistakes = {
        "This is the peak: with so few FLOPs per byte, memory cannot deliver fast enough.": peak,
        "This is the time in seconds: return FLOP/s.": nbytes / bandwidth,
        "The intensity is FLOPs per byte, not bytes per FLOP.": min(peak, nbytes / flops * bandwidth),
    }
    wrong_if(t, got, want, mistakes)
    t.that(
        near(got, want),
        "an operator of {flops:.3g} FLOPs and {nbytes:.3g} bytes reaches {got:.4g} FLOP/s, expected {want:.4g}",
        flops=flops,
        nbytes=nbytes,
        got=got,
        want=want,
    )


@check("roofline", points=1)
def check_peak(student, t):
    "Above the ridge, the peak is the limit"
    flops, nbytes, peak, bandwidth = roof_case(t, memory=False)
    got = t.number(student.attainable(flops, nbytes, peak, bandwidth), "attainable(...)")
    message = "This is more than the peak: the arithmetic is the limit of an operator with many FLOPs per byte."
    t.that(not near(got, flops / nbytes * bandwidth), message)
    t.that(
        near(got, peak),
        "an operator of {flops:.3g} FLOPs and {nbytes:.3g} bytes reaches {got:.4g} FLOP/s, expected {want:.4g}",
        flops=flops,
        nbytes=nbytes,
        got=got,
        want=peak,
    )

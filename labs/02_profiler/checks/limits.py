"""The visible checks of what limits a step: Amdahl's law, the overlap of tracks, FLOPs and the roofline, and
the bottleneck of a program that the student does not know."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import near, same
from dlo_lib.labkit.drawn_programs import CAUSES, Span, program

from .scenarios import overlap_of, predicted_of
from .twins import flops_of, runs_of, ticks

# -- 5 · amdahl


CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def amdahl_case(t) -> dict[str, float]:
    names = ("load", "forward", "backward", "optimizer", "validate", "other")
    return {name: t.uniform(1.0, 20.0) for name in t.shuffled(names)[:4]}


@check("amdahl", points=1)
def check_divided(student, t):
    "Each part is divided by its factor"
    times = amdahl_case(t)
    one, two = t.shuffled(list(times))[:2]
    factors = {one: t.uniform(2.0, 6.0), two: t.uniform(1.5, 3.0)}
    got, after = t.items(student.run(predicted_of, times=times, faster=factors), 2, "the result")
    total, parts = sum(times.values()), [(times[name], factor) for name, factor in factors.items()]
    shorter = sum(time / factor for time, factor in parts)
    longer = sum(time * factor for time, factor in parts)
    rest = total - sum(time for time, _ in parts)
    want, whole = rest + shorter, total / factors[one] / factors[two]
    mistakes = {
        "The parts that are not in `faster` are missing: they stay as they are.": shorter,
        "The times are multiplied by the factors: a part that is twice as fast takes half of the time.": rest
        + longer,
        "The whole step is divided by the factors: only their parts shrink.": whole,
        "This is how many times as fast the step is: return its ms.": total / want,
    }
    same(t, got, want, "the new step in ms", mistakes, **CLOSE)
    message = (
        "predicted_step has changed the dict `times` that it was given, and the caller still uses it: "
        "divide without an assignment to times[name]"
    )
    t.that(after == times, message)


@check("amdahl", points=1)
def check_removed(student, t):
    "An infinite factor removes a part"
    times = amdahl_case(t)
    total = sum(times.values())
    name = t.choice(list(times))
    got = student.predicted_step(times, {name: float("inf")})
    same(t, got, total - times[name], "the step without {name} in ms", **CLOSE, name=name)
    same(t, student.predicted_step(times, {}), total, "the step without a faster part in ms", **CLOSE)


# -- 9 · overlap


Intervals = list[tuple[float, float]]


def intervals(t, count: int, start: int = 0) -> Intervals:
    """Draw intervals in any order, whose ends are quarters; some contain others, and some touch."""
    found = []
    for _ in range(count):
        begin = start + t.integer(0, 60) / 4
        found.append((begin, begin + t.integer(1, 16) / 4))
    begin, end = found[0]
    found += [(end, end + 1.0), (begin + 0.25 * (end - begin > 0.25), end), (40.0 + start, 41.5 + start)]
    return t.shuffled(found)


def length(*lists: Intervals) -> float:
    """The time in which all of these lists are active."""
    return len(set.intersection(*(ticks(each) for each in lists))) / 4


def added(case: Intervals) -> float:
    return sum(end - begin for begin, end in case)


def in_a_loop(case: Intervals, keep_larger: bool = True) -> float:
    """What a loop finds that keeps the last end, or the larger one."""
    total, reached = 0.0, float("-inf")
    for begin, end in case:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end) if keep_larger else end
    return total


def of_union(case: Intervals) -> dict[str, float]:
    """What mistakes give for the length of the union."""
    begin, end = runs_of(case)[-1]
    return {
        "The intervals are taken in the order of the list: sort them by their begin first.": in_a_loop(case),
        "The last run of intervals is missing: add it after the loop.": length(case) - (end - begin),
        "The lengths are added: where intervals overlap, the time counts once.": added(case),
        "This is the time from the first begin to the last end: the gaps do not count.": end - min(case)[0],
        "An interval that ends within an earlier one moves the end back: keep the larger end.": in_a_loop(
            sorted(case), keep_larger=False
        ),
    }


@check("overlap", points=2)
def check_covered(student, t):
    "The length of a union"

    def tells(case: Intervals) -> bool:
        last = in_a_loop(sorted(case), keep_larger=False)
        return len({added(case), last, length(case)}) == 3 and length(case) not in of_union(case).values()

    for _ in range(2):
        case = t.draw_until(lambda: intervals(t, t.integer(6, 9)), tells)
        same(t, student.covered(case), length(case), "covered(...) in ms", of_union(case), **CLOSE)


def in_pairs(a: Intervals, b: Intervals) -> float:
    """The overlaps of all pairs of intervals, added."""
    return sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one in a for two in b)


@check("overlap", points=2)
def check_overlap(student, t):
    "The time in which both are active"

    def draw() -> tuple[Intervals, Intervals]:
        return intervals(t, t.integer(3, 5)), intervals(t, t.integer(3, 5), start=4)

    for _ in range(2):
        a, b = t.draw_until(draw, lambda pair: length(*pair) not in (0.0, in_pairs(*pair)))
        got, *after = t.items(student.run(overlap_of, a=a, b=b), 3, "the result")
        union = length([*a, *b])
        mistakes = {
            "The overlaps of all pairs are added: where two intervals of the same list overlap, the time "
            "counts once.": in_pairs(a, b),
            "This is the union of both: the overlap is what the sum of both lengths counts twice.": union,
            "The lengths of the intervals are added without `covered`: within a list they overlap, "
            "too.": added([*a, *b]) - union,
        }
        same(t, got, length(a, b), "overlap(...) in ms", mistakes, **CLOSE)
        message = (
            "overlap has changed a list that it was given, and the caller still uses it: `a += b` works in "
            "place, [*a, *b] is a new list"
        )
        t.that(all(near(mine, given) for mine, given in zip(after, (a, b))), message)


# -- 10 · flops, 11 · roofline


@check("flops", points=2)
def check_flops(student, t):
    "The FLOPs of a training step"
    for _ in range(2):
        sizes, batch = [t.integer(3, 40) for _ in range(t.integer(3, 5))], t.integer(2, 50)
        want = flops_of(sizes, batch)
        forward, all_three, two = (flops_of(sizes, batch, each) for each in ((1, 1), (3, 3), (1, 2)))
        mistakes = {
            "This is the forward alone: backward has the gradients of the weights, and of the "
            "inputs.": forward,
            "The first layer needs no gradient of its input: nothing asks for the gradient of the "
            "images.": all_three,
            "The gradient of the weights, or of the inputs, is missing: a layer has three products, the "
            "first one two.": two,
            "A multiplication and an addition are two FLOPs: a product takes 2·m·k·n.": want // 2,
            "The batch is missing: the first matrix of each product has a row for each image.": flops_of(
                sizes, 1
            ),
            "The last layer has fewer products, not the first one.": flops_of(sizes[::-1], batch),
        }
        got, what = student.step_flops(sizes, batch), "the FLOPs of {sizes} with a batch of {batch}"
        same(t, got, want, what, mistakes, rtol=0, atol=0, sizes=sizes, batch=batch)


@check("flops", points=1)
def check_mfu(student, t):
    "The share of the peak"
    flops, seconds = t.uniform(1e9, 5e9), t.uniform(0.01, 0.05)
    rate = flops / seconds
    peak = rate * t.uniform(1.5, 4.0)
    want, product = rate / peak, flops * seconds / peak
    mistakes = {
        "This is the inverse: the share of the peak is at most 1.": 1 / want,
        "This is a percentage: return the share, at most 1.": 100 * want,
        "The FLOPs are multiplied by the seconds: the rate is FLOPs divided by seconds.": product,
        "This is the rate in FLOP/s: divide it by the peak.": rate,
    }
    same(t, student.mfu(flops, seconds, peak), want, "mfu(...)", mistakes, **CLOSE)


REACHED = "the FLOP/s of an operator of {flops:.3g} FLOPs and {nbytes:.3g} bytes"


def roof_case(t, memory: bool) -> tuple[float, float, float, float]:
    """Draw FLOPs, bytes, peak and bandwidth, below the ridge or above it."""
    peak, bandwidth, nbytes = t.uniform(5e10, 2e11), t.uniform(5e9, 2e10), t.uniform(1e6, 1e8)
    flops = nbytes * peak / bandwidth * (t.uniform(0.05, 0.5) if memory else t.uniform(2.0, 9.0))
    return flops, nbytes, peak, bandwidth


@check("roofline", points=1)
def check_memory_bound(student, t):
    "Below the ridge, memory is the limit"
    flops, nbytes, peak, bandwidth = roof_case(t, memory=True)
    mistakes = {
        "This is the peak: with so few FLOPs per byte, memory cannot deliver fast enough.": peak,
        "This is the time in seconds: return FLOP/s.": nbytes / bandwidth,
        "The intensity is FLOPs per byte, not bytes per FLOP.": min(peak, nbytes / flops * bandwidth),
    }
    got, want = student.attainable(flops, nbytes, peak, bandwidth), flops / nbytes * bandwidth
    same(t, got, want, REACHED, mistakes, **CLOSE, flops=flops, nbytes=nbytes)


@check("roofline", points=1)
def check_peak(student, t):
    "Above the ridge, the peak is the limit"
    flops, nbytes, peak, bandwidth = roof_case(t, memory=False)
    message = "This is more than the peak: arithmetic is the limit of an operator with many FLOPs per byte."
    mistakes = {message: flops / nbytes * bandwidth}
    got = student.attainable(flops, nbytes, peak, bandwidth)
    same(t, got, peak, REACHED, mistakes, **CLOSE, flops=flops, nbytes=nbytes)


# -- 13 · diagnose


ALONE = {
    "loader": "A step that waits for its data is called {got}, not loader: what runs in `load` and is no "
    "operator is waiting.",
    "read": "A program that reads numbers is called {got}, not read: all spans within `aten::item` belong to "
    "the read.",
    "copy": "A program that copies tensors is called {got}, not copy: all spans within `aten::to` belong to "
    "the copy, also the wait.",
    "float64": "A program with products in float64 is called {got}, not float64: each span has its dtype.",
    "repeated": "A program that runs its forward again is called {got}, not repeated: compare name, shapes "
    "and dtype with the operators of `forward`.",
    "small": "A program with hundreds of small operators is called {got}, not small: each takes less than "
    "0.05 ms, together they take most of the step.",
}


def diagnosis(student, t, spans: list[Span]) -> str:
    """What the student calls the bottleneck of a program."""
    got, names = student.diagnose(spans), [*CAUSES, "healthy"]
    message = "diagnose(...) returned {got}: return one of {names}"
    t.that(type(got) is str and got in names, message, got=got, names=", ".join(names))
    return str(got)


@check("diagnose", points=2)
def check_alone(student, t):
    "Each bottleneck, without another fault beside it"
    for cause in t.shuffled(CAUSES):
        got = diagnosis(student, t, program(t, cause))
        t.that(got == cause, ALONE[cause], got=got)


@check("diagnose", points=2)
def check_most_time(student, t):
    "The bottleneck with most time, beside a smaller one"
    causes = t.shuffled(CAUSES)
    pairs = [*zip(causes, [*causes[1:], causes[0]]), ("small", "copy")]
    message = (
        "The bottleneck is {main}, and {second} takes about half of its time, but diagnose returned {got}: "
        "compare the sums of the self times (not numbers of spans, not durations)."
    )
    for main, second in t.shuffled(pairs):
        got = diagnosis(student, t, program(t, main, second))
        t.that(got == main, message, main=main, second=second, got=got)


@check("diagnose", points=1)
def check_healthy(student, t):
    "A program without a bottleneck, whatever happens outside of its steps"
    found = diagnosis(student, t, program(t, "small"))
    t.that(found == "small", "not tested yet: a bottleneck is not found, see the first check")
    got = diagnosis(student, t, program(t))
    message = (
        "A healthy program is called {got}: a bottleneck takes at least a fifth of the steps, and a product "
        "with shapes that `forward` does not have is not repeated."
    )
    t.that(got == "healthy", message, got=got)
    got = diagnosis(student, t, program(t, outside=True))
    message = (
        "A healthy program is called {got}, because of what happens before its steps or on the track of its "
        "loader: only spans of the steps and within them count."
    )
    t.that(got == "healthy", message, got=got)

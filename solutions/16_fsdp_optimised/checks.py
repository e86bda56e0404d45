"""The visible checks of this lab: what one process can show. Those of ranks are in ``on_ranks.py``.

Plans are followed action by action, costs compared with a clock and with every cut tried (``twins.py``).
"""

from __future__ import annotations

from itertools import pairwise

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import quiz_complete

from .hints import HINTS as HINTS
from .on_ranks import (
    check_blocks_forgotten,
    check_dropout,
    check_gradients_gone,
    check_groups,
    check_hybrid_mean,
    check_hybrid_traffic,
    check_in_order,
    check_masters,
    check_messages_travel,
    check_same_gradients,
    check_same_step,
)
from .quiz import QUIZ
from .scenarios import compiled_blocks, counted
from .twins import Blocks, Table, by_the_clock, followed, joined, least_time, rates, through_blocks, too_large

KINDS = ("gather", "forward", "backward", "free", "reduce")

# -- 1 · plan


def read_plan(student, t, units: int, reshard: bool = True) -> Table:
    """The student's plan: pairs of a kind and a unit, with every computation in its place."""
    got = student.plan(units, reshard) if not reshard else student.plan(units)
    t.that(type(got) is list, "plan({units}) should be a list of pairs", units=units)
    for action in got:
        pair = type(action) is tuple and [type(part) for part in action] == [str, int]
        good = pair and action[0] in KINDS and 0 <= action[1] < units
        t.that(
            bool(good), 'plan({units}) has {action}: an action is ("gather", k) or one of the other four kinds', units=units, action=action
        )
    computed = [action for action in got if action[0] in ("forward", "backward")]
    wanted = [("forward", k) for k in range(units)] + [("backward", k) for k in reversed(range(units))]
    t.that(
        computed == wanted,
        "plan({units}) computes {got}: forwards 0, 1, ..., then backwards in the opposite order",
        units=units,
        got=computed,
    )
    return got


def whole_after_each(table: Table) -> list[set[int]]:
    """The units that are whole or on their way, after each action."""
    whole: set[int] = set()
    found = []
    for kind, k in table:
        whole = whole | {k} if kind == "gather" else whole - {k} if kind == "free" else whole
        found.append(whole)
    return found


@check("plan", points=1)
def check_plan_is_legal(student, t):
    "Units are whole when they compute, gradients are averaged, nothing is left over"
    for units in (1, 2, t.integer(3, 6), t.integer(7, 12)):
        table = read_plan(student, t, units)
        before: set[int] = set()
        done: list[tuple[str, int]] = []
        for action, after in zip(table, whole_after_each(table)):
            kind, k = action
            where = {"units": units, "kind": kind, "k": k}
            if kind in ("forward", "backward"):
                t.that(k in before, "plan({units}): {kind} {k} computes a unit that has not been gathered, or is freed already", **where)
                unreduced = [("reduce", other) for name, other in done if name == "backward" and ("reduce", other) not in done]
                t.that(not unreduced, "plan({units}): {kind} {k} begins before the gradient of the unit before is reduced", **where)
            if kind == "gather":
                t.that(k not in before, "plan({units}): unit {k} is gathered while it is whole already", **where)
            if kind == "reduce":
                good = ("backward", k) in done and ("reduce", k) not in done
                t.that(good, "plan({units}): unit {k} is reduced twice, or before its backward", **where)
            before = after
            done.append(action)
        t.that(not before, "plan({units}): at the end units {left} are whole still", units=units, left=sorted(before))
        missing = [k for k in range(units) if ("reduce", k) not in table]
        t.that(not missing, "plan({units}): the gradients of units {missing} are never reduced", units=units, missing=missing)


@check("plan", points=1)
def check_next_is_under_way(student, t):
    "The next unit is asked for before this one computes"
    for units in (2, t.integer(3, 6), t.integer(7, 12)):
        table = read_plan(student, t, units)
        computed = [(action, whole) for action, whole in zip(table, whole_after_each(table)) if action[0] in ("forward", "backward")]
        for ((kind, k), whole), ((_, following), _) in pairwise(computed):
            message = (
                "plan({units}): when {kind} {k} computes, nobody has asked for unit {following} yet, so its message has to be waited for"
            )
            t.that(following in whole, message, units=units, kind=kind, k=k, following=following)


@check("plan", points=1)
def check_two_units(student, t):
    "At most two units are whole or on their way"
    for units in (2, t.integer(3, 6), t.integer(7, 12)):
        table = read_plan(student, t, units)
        for (kind, k), whole in zip(table, whole_after_each(table)):
            message = "plan({units}): after {kind} {k} the units {whole} are whole or on their way, two are enough"
            t.that(len(whole) <= 2, message, units=units, kind=kind, k=k, whole=sorted(whole))


# -- 2 · policy


def policies(t) -> tuple[list[int], int, list[int]]:
    """Units of uneven sizes, the ranks, and the three policies."""
    group = t.integer(2, 4)
    world = group * t.integer(2, 4)
    return [2**10 * t.integer(1, 60) for _ in range(t.integer(4, 9))], world, [world, group, 1]


def cost(student, t, units: list[int], world: int, keep: int) -> list[float]:
    """The student's two numbers."""
    got = t.items(student.gather_cost(units, world, keep), 2, "gather_cost(units, world, keep)")
    return [t.number(value, "gather_cost(...)[{i}]", i=i) for i, value in enumerate(got)]


@check("policy", points=1)
def check_peak(student, t):
    "The peak of gathered weights"
    for _ in range(3):
        units, world, keeps = policies(t)
        for keep in keeps:
            what = "the peak for units of {units} bytes on {world} ranks with keep = {keep}"
            got, want = cost(student, t, units, world, keep)[0], followed(units, world, keep)[0]
            shards_too = keep == world and 1e-6 * want < got - want <= sum(units) / world
            t.that(
                not shards_too,
                "the peak is too large with keep = world: between forward and backward nothing *beyond* the rank's own shard is kept",
            )
            t.close(got, want, what, units=units, world=world, keep=keep)


@check("policy", points=1)
def check_sent(student, t):
    "The bytes that are sent"
    for _ in range(2):
        units, world, keeps = policies(t)
        for keep in keeps:
            what = "the bytes sent for units of {units} bytes on {world} ranks with keep = {keep}"
            got, want = cost(student, t, units, world, keep)[1], followed(units, world, keep)[1]
            last_again = keep > 1 and abs(got - want - units[-1] * (keep - 1) / keep) <= 1e-6 * want
            t.that(not last_again, "the last unit is gathered a second time in your count: backward begins with it, so it stays whole")
            t.close(got, want, what, units=units, world=world, keep=keep)


# -- 3 · wrapping


def timed_blocks(t, blocks: int, busy: float) -> tuple[Blocks, float, float]:
    """Blocks, alpha and beta; ``busy``: how long computing takes, compared with messages."""
    alpha, beta = t.uniform(0.5, 2.0), t.uniform(0.5, 2.0) * 1e-3
    return [(t.integer(500, 3000), busy * t.uniform(1.0, 4.0)) for _ in range(blocks)], alpha, beta


@check("wrapping", points=1)
def check_forward_time(student, t):
    "The time of a forward pass"
    for busy in (0.2, 1.0, 5.0):
        for blocks in (1, 2, t.integer(3, 9)):
            units, alpha, beta = timed_blocks(t, blocks, busy)
            want = by_the_clock(units, alpha, beta)
            got = t.number(student.forward_time(units, alpha, beta), "forward_time(...)")
            one_by_one = sum(alpha + beta * size + seconds for size, seconds in units)
            waits = blocks > 1 and abs(got - one_by_one) <= 1e-9 * one_by_one
            t.that(not waits, "that is the time when nothing overlaps: the message of unit k+1 travels while unit k computes")
            t.close(got, want, "forward_time of {blocks} units, alpha {alpha:.2f}, beta {beta:.2g}", blocks=blocks, alpha=alpha, beta=beta)


def chosen(student, t, blocks: Blocks, limit: int, alpha: float, beta: float) -> Blocks:
    """The student's units, which have all blocks and fit."""
    counts = student.choose_units(blocks, limit, alpha, beta)
    good = type(counts) is list and bool(counts) and all(type(count) is int and count > 0 for count in counts)
    t.that(good and sum(counts) == len(blocks), "choose_units gives {counts} for {n} blocks", counts=counts, n=len(blocks))
    units = joined(blocks, counts)
    t.that(not too_large(units, limit), "choose_units gives {counts}: two of these units have more than the limit together", counts=counts)
    return units


@check("wrapping", points=2, seconds=20)
def check_choice(student, t):
    "The fastest units that fit"
    for busy in (0.3, 1.0, 1.0, 3.0):
        blocks, alpha, beta = timed_blocks(t, t.integer(6, 8), busy)
        limit = max(sum(size for size, _ in blocks[k : k + 4]) for k in range(len(blocks)))
        got, want = by_the_clock(chosen(student, t, blocks, limit, alpha, beta), alpha, beta), least_time(blocks, limit, alpha, beta)
        t.close(got, want, "the forward time of your units for {n} blocks", n=len(blocks), rtol=1e-6)


# -- 8 · compile


def counts(student, t, segments: list[int], times: int = 1) -> list[list[int]]:
    """What ``graphs_of`` says, asked so many times in one process."""
    (got,) = student.ranks(counted, [{"segments": segments, "times": times, "size": t.integer(2, 9)}]).results
    return t.items(got, times, "graphs_of(...)")


@check("compile", points=1, seconds=40)
def check_graphs(student, t):
    "Operations in each graph, in order"
    segments = [t.integer(1, 4), t.integer(5, 9), t.integer(1, 4)]
    for case in ([t.integer(2, 6)], segments):
        t.equal(counts(student, t, case)[0], case, "graphs_of a function with {n} graph breaks", n=len(case) - 1)


def compiled(student, t, depths: list[int], hooks: bool = True) -> None:
    """Blocks compute what they do when each is one graph with nothing of its hooks in it."""
    size, amount = t.integer(2, 6), t.uniform(0.1, 0.4)
    shards, x = [t.normal(size) for _ in depths], t.normal(size)
    (got,) = student.ranks(compiled_blocks, [{"shards": shards, "depths": depths, "x": x, "amount": amount, "hooks": hooks}]).results
    got, operations = t.tensor(got, "the output of the compiled blocks", shape=x.shape), [2 * depth for depth in depths]
    plain = bool((got - through_blocks(shards, depths, x, 0.0)).abs().max() < 1e-5)
    t.that(not plain, "the blocks compute, but your backend was given no graph: they are not compiled")
    message = (
        "each graph adds a number for each of its operations to what it gives: with graphs of {operations} operations for {blocks} blocks the output "
        "would be another. Something of the hooks is in a graph, or not all blocks are compiled"
    )
    good = bool((got - through_blocks(shards, depths, x, amount)).abs().max() < 1e-4)
    t.that(good, message, operations=operations, blocks=len(depths))


@check("compile", points=2, seconds=40)
def check_hooks_outside(student, t):
    "A block is one graph, and its hooks are not in it"
    compiled(student, t, [t.integer(2, 5)])


# -- 9 · sweep


def sweep_case(t, names: tuple[str, ...]) -> dict[str, list[tuple[int, float, float]]]:
    """The more is sharded the less memory at rest, and the more seconds a step costs once; memory rises faster beyond the middle."""
    runs = {}
    for i, name in enumerate(names):
        rest, slope = 1e9 * t.uniform(2, 4) / (i + 1), 1e9 * t.uniform(0.3, 0.6)
        once, each = (i + 1) * t.uniform(0.2, 0.4), t.uniform(0.05, 0.1)
        batches = sorted({t.integer(1, 3), t.integer(4, 6), t.integer(7, 9)})
        steeper = slope * t.uniform(0.5, 1.5)
        runs[name] = [(batch, rest + slope * batch + steeper * max(0, batch - batches[1]), once + each * batch) for batch in batches]
    return runs


def best_by_trying(runs, limit: float) -> tuple[str, int] | None:
    """The largest batch of each name, every smaller one tried before it; the fastest of them."""
    largest = {name: found[-1] for name, points in runs.items() if (found := rates(points, limit))}
    if not largest:
        return None
    name = max(largest, key=lambda each: largest[each][1])
    return name, largest[name][0]


@check("sweep", points=2)
def check_fastest(student, t):
    "The fastest run that fits"
    for _ in range(6):
        runs, limit = sweep_case(t, ("ddp", "fsdp", "fsdp + compile")), 1e9 * t.uniform(7.0, 30.0)
        got = t.items(student.fastest(runs, limit), 2, "fastest(runs, limit)")
        want = list(best_by_trying(runs, limit))
        t.equal(got, want, "fastest(runs, {limit:.1f} GB)", limit=limit / 1e9)


# -- quiz

complete_quiz = quiz_complete(QUIZ, points=1)

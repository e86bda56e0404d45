"""The visible checks that need one process. Those of ranks are in ``runs.py``.

Plans are followed action by action; costs are compared with a simulation and with the best of all cuts
(``twins.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, claimed, scenario
from dlo_lib.grading.checks.graphs import replay
from dlo_lib.labkit.compare import wrong_if

from . import twins
from .twins import Blocks, Table

KINDS = ("gather", "forward", "backward", "free", "reduce")
WITH_WEIGHT, ALONE = ("mul", "add", "sub"), ("tanh", "sin", "cos", "sigmoid")
MOST_RUNS = 60  # of graphs, in one run of the blocks

# -- the blocks that are compiled


class Block(torch.nn.Module):
    """Computes the operations of a list in turn, some of them with a weight, which hooks may set."""

    def __init__(self, operations):
        super().__init__()
        self.operations, self.weight = operations, None

    def forward(self, x):
        for name in self.operations:
            function = getattr(torch, name)
            x = function(x, self.weight) if name in ("mul", "add", "sub") else function(x)
        return x


def bring(shard):
    """A hook that sets the weight before forward."""

    def hook(module, args):
        module.weight = shard + shard

    return hook


def take(module, args, output):
    """A hook that removes the weight after forward."""
    module.weight = None


def asks(graph_ran):
    """A backend of the compiler that asks the check, at each run of a graph, what to add to its outputs."""
    from dlo_lib.profiling.compile_capture import plain_graph

    def backend(graph, example_inputs):
        plain = plain_graph(graph)

        def run(*args):
            more = graph_ran(plain, list(args))
            return [value + more if torch.is_tensor(value) else value for value in graph.forward(*args)]

        return run

    return backend


@scenario
def compiled_blocks(student, shards, programs, x, graph_ran, hooks):
    """Run blocks whose hooks set and remove their weight.

    Returns the output, and the line that calls ``torch.compile``, for the message.
    """
    import linecache
    import os
    import sys
    from unittest import mock

    of_torch, compiler, lines = os.path.dirname(torch.__file__), torch.compile, [""]

    def watched(*args, **kwargs):
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(of_torch):
            frame = frame.f_back
        lines.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()[:120])
        return compiler(*args, **kwargs)

    torch._dynamo.reset()
    blocks = torch.nn.ModuleList([Block(program) for program in programs])
    for block, shard in zip(blocks, shards):
        if hooks:
            block.register_forward_pre_hook(bring(shard))
            block.register_forward_hook(take)
        else:
            block.weight = shard + shard
    with mock.patch.object(torch, "compile", watched):
        student.compile_blocks(blocks, asks(graph_ran))
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    return x, claimed(lines[-1])


# -- 1 · plan


def called(units: int, reshard: bool) -> str:
    """Return the call of ``plan`` as a student writes it."""
    return f"plan({units})" if reshard else f"plan({units}, reshard=False)"


def read_plan(student, t, units: int, reshard: bool = True) -> Table:
    """Return the student's plan; check its pairs of a kind and a unit, and the order of the computations."""
    got = student.plan(units) if reshard else student.plan(units, reshard=False)
    name = called(units, reshard)
    t.that(type(got) is list, "{name} must be a list of pairs", name=name)
    for action in got:
        where = {"name": name, "action": action, "last": units - 1}
        message = '{name} has {action}: an action is a tuple, such as ("gather", 0)'
        t.that(type(action) is tuple, message, **where)
        pair = [type(part) for part in action] == [str, int] and action[0] in KINDS
        message = '{name} has {action}: an action is ("gather", k) or one of the other four kinds'
        t.that(bool(pair), message, **where)
        t.that(0 <= action[1] < units, "{name} has {action}: its units have the numbers 0 to {last}", **where)
    computed = [action for action in got if action[0] in ("forward", "backward")]
    wanted = [("forward", k) for k in range(units)] + [("backward", k) for k in reversed(range(units))]
    message = "{name} computes {got}, not the forwards 0, 1, ..., then the backwards in the opposite order"
    t.that(computed == wanted, message, name=name, got=computed)
    return got


def whole_after_each(table: Table) -> list[set[int]]:
    """Return the units that are whole or in transit, after each action."""
    whole: set[int] = set()
    found = []
    for kind, k in table:
        whole = whole | {k} if kind == "gather" else whole - {k} if kind == "free" else whole
        found.append(whole)
    return found


@check("plan", points=1)
def check_plan_is_legal(student, t):
    "Units are whole when they compute, gradients are reduced, and every unit is freed"
    for units in (1, 2, t.integer(3, 6), t.integer(7, 12)):
        for reshard in (True, False):
            legal(t, read_plan(student, t, units, reshard), units, called(units, reshard))


def legal(t, table: Table, units: int, name: str) -> None:
    """Follow a table action by action."""
    before: set[int] = set()
    done: list[tuple[str, int]] = []
    for action, after in zip(table, whole_after_each(table)):
        kind, k = action
        where = {"name": name, "kind": kind, "k": k}
        if kind in ("forward", "backward"):
            message = "{name}: {kind} {k} computes a unit that is not gathered, or already freed"
            t.that(k in before, message, **where)
            backwards = [other for what, other in done if what == "backward"]
            unreduced = [other for other in backwards if ("reduce", other) not in done]
            message = (
                "{name}: {kind} {k} begins before the reduction of the gradient of unit {other} starts, so "
                "they do not overlap"
            )
            t.that(not unreduced, message, other=unreduced[0] if unreduced else k, **where)
        if kind == "gather":
            message = "{name}: unit {k} is gathered while it is already whole or in transit"
            t.that(k not in before, message, **where)
        if kind == "free":
            t.that(k in before, "{name}: unit {k} is freed while it is already free", **where)
        if kind == "reduce":
            good = ("backward", k) in done and ("reduce", k) not in done
            t.that(good, "{name}: unit {k} is reduced twice, or before its backward", **where)
        before = after
        done.append(action)
    t.that(not before, "{name}: at the end units {left} are still whole", name=name, left=sorted(before))
    missing = [k for k in range(units) if ("reduce", k) not in table]
    message = "{name}: the gradients of units {missing} are never reduced"
    t.that(not missing, message, name=name, missing=missing)


@check("plan", points=1)
def check_next_is_under_way(student, t):
    "The gather of the next unit starts before a unit computes"
    for units in (2, t.integer(3, 6), t.integer(7, 12)):
        for reshard in (True, False):
            table = read_plan(student, t, units, reshard)
            held = zip(table, whole_after_each(table))
            computed = [step for step in held if step[0][0] in ("forward", "backward")]
            for ((kind, k), whole), ((_, following), _) in pairwise(computed):
                message = (
                    "{name}: {kind} {k} computes before the gather of unit {following} starts, so the rank "
                    "waits for its message"
                )
                where = {"name": called(units, reshard), "kind": kind, "k": k, "following": following}
                t.that(following in whole, message, **where)


@check("plan", points=1)
def check_two_units(student, t):
    "At most two units are whole or in transit"
    for units in (2, t.integer(3, 6), t.integer(7, 12)):
        table = read_plan(student, t, units)
        for (kind, k), whole in zip(table, whole_after_each(table)):
            message = (
                "plan({units}): after {kind} {k} the units {whole} are whole or in transit: two are enough"
            )
            t.that(len(whole) <= 2, message, units=units, kind=kind, k=k, whole=sorted(whole))


@check("plan", points=1)
def check_kept_whole(student, t):
    "Without resharding every unit is gathered once"
    units = t.integer(3, 8)
    table = read_plan(student, t, units, reshard=False)
    gathers = sorted(k for kind, k in table if kind == "gather")
    message = (
        "plan({units}, reshard=False) gathers the units {gathers}: each unit is gathered once, and stays "
        "whole until the end of its backward"
    )
    t.that(gathers == list(range(units)), message, units=units, gathers=gathers)


@check("plan", points=1)
def check_no_gather_too_many(student, t):
    "Backward begins with a unit that is already whole"
    units = t.integer(3, 8)
    gathered = [k for kind, k in read_plan(student, t, units) if kind == "gather"]
    message = (
        "plan({units}) gathers unit {last} more than once: the last unit of forward is the first of "
        "backward, so it stays whole"
    )
    t.that(gathered.count(units - 1) <= 1, message, units=units, last=units - 1)
    for k in range(units - 1):
        message = "plan({units}) gathers unit {k} more than twice, not once for forward and once for backward"
        t.that(gathered.count(k) <= 2, message, units=units, k=k)


# -- 2 · policy


def policies(t) -> tuple[list[int], int, list[int]]:
    """Draw units of uneven sizes, the number of ranks, and the three policies.

    The two largest units are no neighbours, and units come before the largest pair of neighbours: otherwise
    two mistakes give the right peak.
    """
    group = t.integer(2, 4)
    world = group * t.integer(2, 4)

    def tells(units: list[int]) -> bool:
        first, *others = (sum(pair) for pair in pairwise(units))
        return sum(sorted(units)[-2:]) > max(others) > first

    def draw() -> list[int]:
        return [2**10 * t.integer(1, 60) for _ in range(t.integer(4, 9))]

    return t.draw_until(draw, tells), world, [world, group, 1]


def cost(student, t, units: list[int], world: int, keep: int) -> list[float]:
    """Return the student's two numbers."""
    got = t.items(student.gather_cost(units, world, keep), 2, "gather_cost(units, world, keep)")
    return [t.number(value, "gather_cost(...)[{i}]", i=i) for i, value in enumerate(got)]


TWO_LARGEST = "the peak is that of the two largest units, but a unit is whole together with its neighbour"
WITH_SHARDS = "with keep = world the peak counts shards: a rank keeps its shard, which is not gathered"


@check("policy", points=2)
def check_peak(student, t):
    "The peak of gathered weights"
    for _ in range(3):
        units, world, keeps = policies(t)
        for keep in keeps:
            what = "the peak for units of {units} bytes on {world} ranks with keep = {keep}"
            got, want = cost(student, t, units, world, keep)[0], twins.followed(units, world, keep)[0]
            if keep == world:
                largest, shards = (
                    sum(sorted(units)[-2:]),
                    twins.followed(units, world, keep, shards_count=True)[0],
                )
                wrong_if(t, got, want, {TWO_LARGEST: largest, WITH_SHARDS: shards})
            t.close(got, want, what, units=units, world=world, keep=keep)


@check("policy", points=2)
def check_sent(student, t):
    "The bytes sent for gathers"
    for _ in range(2):
        units, world, keeps = policies(t)
        for keep in keeps:
            what = "the bytes sent for units of {units} bytes on {world} ranks with keep = {keep}"
            got, want = cost(student, t, units, world, keep)[1], twins.followed(units, world, keep)[1]
            last_again = keep > 1 and abs(got - want - units[-1] * (keep - 1) / keep) <= 1e-6 * want
            message = "your count gathers the last unit a second time: backward begins with it"
            t.that(not last_again, message)
            t.close(got, want, what, units=units, world=world, keep=keep)


# -- 3 · wrapping


def timed_blocks(t, blocks: int, busy: float) -> tuple[Blocks, float, float]:
    """Draw blocks, alpha and beta; ``busy`` is the time of computing relative to that of messages."""
    alpha, beta = t.uniform(0.5, 2.0), t.uniform(0.5, 2.0) * 1e-3
    return [(t.integer(500, 3000), busy * t.uniform(1.0, 4.0)) for _ in range(blocks)], alpha, beta


TELLING: tuple[tuple[Blocks, float, float], ...] = (
    # unit 0 computes longer than the messages of units 1 and 2 need
    ([(1000, 5.0), (1000, 1.0), (3000, 1.0)], 1.0, 1e-3),
    # no two neighbours have the same order of message and computing
    ([(3000, 1.0), (1000, 6.0), (2000, 2.0), (500, 4.0)], 0.5, 1e-3),
    # the messages take longer
    ([(500, 1.0), (4000, 1.0), (500, 1.0), (4000, 3.0)], 1.0, 1e-3),
)
"""Units, alpha and beta that give another time to each known mistake."""


def scaled(case: tuple[Blocks, float, float], factor: float) -> tuple[Blocks, float, float]:
    """Multiply all times of a case."""
    units, alpha, beta = case
    return [(size, factor * seconds) for size, seconds in units], factor * alpha, factor * beta


NO_OVERLAP = (
    "this is the time when nothing overlaps: the message of unit k+1 is in transit while unit k computes"
)
AT_ONCE = (
    "this is the time when all gathers start at the beginning: the gather of unit k+1 starts when unit k "
    "begins to compute"
)


@check("wrapping", points=1)
def check_forward_time(student, t):
    "The time of a forward pass"
    drawn = [timed_blocks(t, blocks, busy) for busy in (0.2, 1.0, 5.0) for blocks in (1, 2, t.integer(3, 9))]
    for units, alpha, beta in [*(scaled(case, t.uniform(0.5, 2.0)) for case in TELLING), *drawn]:
        want = twins.by_the_clock(units, alpha, beta)
        got = t.number(student.forward_time(units, alpha, beta), "forward_time(...)")
        alone = sum(alpha + beta * size + seconds for size, seconds in units)
        wrong_if(t, got, want, {NO_OVERLAP: alone, AT_ONCE: twins.all_at_once(units, alpha, beta)})
        where = {"blocks": len(units), "alpha": alpha, "beta": beta}
        t.close(got, want, "forward_time of {blocks} units, alpha {alpha:.2f}, beta {beta:.2g}", **where)


def chosen(student, t, blocks: Blocks, limit: int, alpha: float, beta: float) -> Blocks:
    """Return the student's units; check that they have all blocks and fit."""
    counts = student.choose_units(blocks, limit, alpha, beta)
    good = type(counts) is list and bool(counts) and all(type(count) is int and count > 0 for count in counts)
    message = "choose_units returns {counts} for {n} blocks"
    t.that(good and sum(counts) == len(blocks), message, counts=counts, n=len(blocks))
    units = twins.joined(blocks, counts)
    message = "choose_units returns {counts}: two successive units have more than the limit together"
    t.that(not twins.too_large(units, limit), message, counts=counts)
    return units


@check("wrapping", points=2, seconds=20)
def check_choice(student, t):
    "The fastest units that fit"
    for busy in (0.3, 1.0, 1.0, 3.0):
        blocks, alpha, beta = timed_blocks(t, t.integer(6, 8), busy)
        limit = max(sum(size for size, _ in blocks[k : k + 4]) for k in range(len(blocks)))
        got = twins.by_the_clock(chosen(student, t, blocks, limit, alpha, beta), alpha, beta)
        want = twins.least_time(blocks, limit, alpha, beta)
        t.close(got, want, "the forward time of your units for {n} blocks", n=len(blocks), rtol=1e-6)


# -- 10 · compile
#
# At each run of a graph, the backend asks the check what to add to the outputs. So the check has the graphs
# and their inputs, and the amounts appear in the result only if the graphs run. A graph is then run on other
# values, which are drawn afterwards: they show what it computes.


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph, and what the check added to its outputs."""

    graph: dict[str, Any]
    args: list[Any]
    amount: float

    def reads(self, value: Tensor) -> bool:
        """Return whether ``value`` is one of the inputs of the graph."""
        return any(_same(arg, value) for arg in self.args)

    def block(self, t, weights: list[Tensor], programs: list[list[str]]) -> int | None:
        """Return the block that this graph computes with its own weight, None if there is none."""
        for k, (weight, program) in enumerate(zip(weights, programs)):
            is_weight = [_same(arg, weight) for arg in self.args]
            if sorted(is_weight) != [False, True]:
                continue
            x, other = t.normal(*weight.shape), t.normal(*weight.shape)
            outputs = replay(self.graph, [other if each else x for each in is_weight])
            if len(outputs) == 1 and _near(outputs[0], twins.through_block(x, other, program)):
                return k
        return None


def _same(arg: Any, value: Tensor) -> bool:
    return isinstance(arg, Tensor) and arg.dtype == value.dtype and torch.equal(arg, value)


def _near(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() < 1e-4)


def layers(t, depth: int) -> list[str]:
    """Draw the operations of a block: two of each layer, the first with the weight."""
    return [t.choice(names) for _ in range(depth) for names in (WITH_WEIGHT, ALONE)]


def compiled(student, t, depths: list[int], hooks: bool = True) -> None:
    """Check that each block is one graph, without operations of its hooks."""
    number, size = len(depths), t.integer(2, 6)
    programs = [layers(t, depth) for depth in depths]
    shards, x = [t.normal(size) for _ in depths], t.normal(size)
    weights = [2 * shard for shard in shards]
    runs: list[GraphRun] = []

    def graph_ran(graph: Any, args: Any) -> float:
        runs.append(GraphRun(graph, args, t.uniform(0.1, 0.4)))
        return runs[-1].amount

    asked = t.asked(
        graph_ran, calls=MOST_RUNS, too_many="the blocks run more graphs than they have operations"
    )
    inputs = {"shards": shards, "programs": programs, "x": x, "graph_ran": asked, "hooks": hooks}
    result = student.run(compiled_blocks, **inputs)
    got, line = t.items(result, 2, "the output of the compiled blocks and the line that compiles")
    got = t.tensor(got, "the output of the compiled blocks", shape=x.shape)
    call = f"`{line}`" if f"{line}" else "compile_blocks"
    t.that(bool(runs), "the backend received no graph: the blocks are not compiled")
    message = (
        "the backend received the operations of the hooks too: {call} compiles the call of the block, which "
        "runs its hooks. Compile block.forward"
    )
    hooks_too = hooks and any(run.reads(shard) for run in runs for shard in shards)
    t.that(not hooks_too, message, call=call)
    found = {id(run): run.block(t, weights, programs) for run in runs}
    last = {found[id(run)]: run.amount for run in runs}
    for k in range(number if number > 1 else 0):
        message = (
            "every block computes what block {k} does, counted from 0. A function that is defined in a loop "
            "looks its names up when it is called, and then they have their last values. Assign the result "
            "of {call} itself to block.forward"
        )
        t.that(set(last) != {k} or len(runs) < number, message, k=k, call=call)
    message = (
        "the {number} blocks should be graphs of {operations} operations, and one of the graphs computes "
        "something else. {call} should compile the forward of each block, and nothing else"
    )
    operations = [2 * depth for depth in depths]
    t.that(None not in last, message, operations=operations, number=number, call=call)
    missing = [k for k in range(number) if k not in last]
    message = (
        "the backend received no graph of blocks {missing} of {number}, counted from 0: {call} runs for "
        "the other blocks only"
    )
    t.that(not missing, message, missing=missing, number=number, call=call)
    for k, (weight, program) in enumerate(zip(weights, programs)):
        x = twins.through_block(x, weight, program) + last[k]
    t.close(got, x, "the output of the compiled blocks, which is what the graphs return", atol=1e-4)


@check("compile", points=2, seconds=40)
def check_hooks_outside(student, t):
    "A block is one graph, without its hooks"
    compiled(student, t, [t.integer(2, 5)])


@check("compile", points=2, seconds=40)
def check_several_blocks(student, t):
    "Several blocks with different computations"
    compiled(student, t, t.shuffled([1, 3, 5]), hooks=False)


# -- 8 · sweep


def sweep_case(t, names: tuple[str, ...]) -> dict[str, list[tuple[int, float, float]]]:
    """Draw measured points: later names need less memory at rest and have a larger fixed cost."""
    runs = {}
    for i, name in enumerate(names):
        rest, slope = 1e9 * t.uniform(2, 4) / (i + 1), 1e9 * t.uniform(0.3, 0.6)
        once, each = (i + 1) * t.uniform(0.2, 0.4), t.uniform(0.05, 0.1)
        batches = sorted({t.integer(1, 3), t.integer(4, 6), t.integer(7, 9)})
        runs[name] = [
            (batch, rest + slope * batch, once + each * batch * t.uniform(0.9, 1.4)) for batch in batches
        ]
    return runs


def in_order_of_rate(runs, limit: float) -> list[tuple[str, int]]:
    """Return the points that fit, the fastest first."""
    points = [(name, *point) for name, points in runs.items() for point in points]
    fit = sorted((seconds / batch, name, batch) for name, batch, peak, seconds in points if not peak > limit)
    return [(name, batch) for _, name, batch in fit]


FORMS = ("ddp", "fsdp", "fsdp + checkpointing")


def a_little_too_large(t) -> tuple[dict[str, list[tuple[int, float, float]]], float]:
    """Draw points, and a limit that the peak of the fastest of all points exceeds a little."""
    runs = sweep_case(t, FORMS)
    name, batch = in_order_of_rate(runs, float("inf"))[0]
    return runs, next(peak for size, peak, _ in runs[name] if size == batch) / t.uniform(1.02, 1.15)


@check("sweep", points=2)
def check_fastest(student, t):
    "The fastest point that fits"
    cases = [
        t.draw_until(lambda: a_little_too_large(t), lambda case: bool(in_order_of_rate(*case)))
        for _ in range(2)
    ]
    cases += [(sweep_case(t, FORMS), 1e9 * t.uniform(4.5, 9.0)) for _ in range(8)]
    for runs, limit in cases:
        got = t.items(student.fastest(runs, limit), 2, "fastest(runs, limit)")
        name, batch = in_order_of_rate(runs, limit)[0]
        peaks = {(form, size): peak for form, points in runs.items() for size, peak, _ in points}
        known = type(got[0]) is str and type(got[1]) is int and (got[0], got[1]) in peaks
        t.that(known, "fastest(...) returns {got}, which is no measured point of `runs`", got=got)
        message = "fastest(...) returns {got}, whose peak is above the limit"
        t.that(peaks[got[0], got[1]] <= limit, message, got=got)
        largest = max(size for (_, size), peak in peaks.items() if peak <= limit)
        slow = got[1] == largest and got != [name, batch]
        message = "fastest(...) returns {got}, the largest batch that fits: compare sequences per second"
        t.that(not slow, message, got=got)
        t.equal(got, [name, batch], "fastest(runs, {limit:.1f} GB)", limit=limit / 1e9)
    name, batch = in_order_of_rate(runs, float("inf"))[0]
    exact = t.items(student.fastest(runs, peaks[name, batch]), 2, "fastest(runs, limit)")
    message = (
        "the peak of {best} is exactly the limit, so it fits, but fastest(...) returns {got}: a point fits "
        "if its peak is at most the limit"
    )
    t.that(exact == [name, batch], message, best=(name, batch), got=exact)


@check("sweep", points=1)
def check_does_not_fit(student, t):
    "No point fits"
    some = student.fastest(sweep_case(t, ("ddp", "fsdp")), 1e12)
    message = "not tested yet: every point fits 1000 GB, and fastest(...) returns None, see the first check"
    t.that(some is not None, message)
    got = student.fastest(sweep_case(t, ("ddp", "fsdp")), 1e9 * t.uniform(0.1, 0.9))
    t.that(got is None, "no point fits, so the answer is None, not {got}", got=got)

"""The visible checks of the memory and the time of a plan."""

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, near, wrong_if
from dlo_lib.profiling import Part

from .twins import (
    batch_of,
    drawn_cluster,
    drawn_config,
    drawn_plan,
    forward_flops,
    in_flight,
    kept_by_a_block,
    makespan,
    parameters_of,
    planned,
    ring,
)

# -- memory


def part_of(student, t, name: str, config, plan, batch: int, seq: int, last: bool = False) -> float:
    return entry(t, student.rank_memory(config, plan, batch, seq, last), name, "rank_memory(...)")


def said(plan: dict) -> str:
    """A plan in a few words, for a message."""
    names = [f"{name} {int(value)}" for name, value in plan.items() if value > 1 or value is True]
    return ", ".join(names).replace("sharded 1", "sharded").replace("checkpointing 1", "checkpointing")


def state_of(config, plan: dict) -> float:
    """Bytes of the state of the first or the last rank, from counted parameters."""
    counted = parameters_of(config)
    tables = 2 if plan["pp"] == 1 else 1
    whole = config.num_layers // plan["pp"] * counted["block"] + tables * counted["table"]
    return 16 * whole / plan["tp"]


@check("memory", points=1)
def check_state(student, t):
    "The state of a stage, 16 bytes for each parameter"
    for last in (False, True):
        config, plan = drawn_config(t), drawn_plan(t, sharded=False)
        got = part_of(student, t, "state", config, plan, batch_of(t, plan), 64 * t.integer(1, 4), last)
        want = state_of(config, plan)
        message = (
            '"state" is {got:,.0f}, counted {want:,.0f} ({plan}): blocks and one table of the '
            "stage, 1/t of them"
        )
        t.that(near(got, want, 0.005), message, got=got, want=want, plan=said(plan))


@check("memory", points=1)
def check_state_of_one(student, t):
    "One stage has both tables"
    config, plan = drawn_config(t), drawn_plan(t, pp=1, sharded=False)
    got, want = (
        part_of(student, t, "state", config, plan, batch_of(t, plan), 64 * t.integer(1, 4)),
        state_of(config, plan),
    )
    message = (
        '"state" is {got:,.0f}, counted {want:,.0f} ({plan}): with one stage a rank has embedding and head'
    )
    t.that(near(got, want, 0.005), message, got=got, want=want, plan=said(plan))


@check("memory", points=1)
def check_sharded(student, t):
    "A sharded plan divides the state over the copies"
    config, plan = drawn_config(t), drawn_plan(t, sharded=True)
    got = part_of(student, t, "state", config, plan, batch_of(t, plan), 64 * t.integer(1, 4))
    want = state_of(config, plan) / plan["dp"]
    message = '"state" is {got:,.0f}, counted {want:,.0f} ({plan}): each of the d copies keeps 1/d'
    t.that(near(got, want, 0.005), message, got=got, want=want, plan=said(plan))


def same_copies(student, t, plan: dict, part: Part, why: str) -> None:
    config, batch, seq = drawn_config(t), batch_of(t, plan), 64 * t.integer(1, 4)
    got = part_of(student, t, "copies", config, plan, batch, seq)
    want = planned(config, plan, batch, seq, False)[part.value]
    message = '"copies" is {got:,.0f}, the planner has {want:,.0f} ({plan}): ' + why
    t.that(near(got, want, 0.06), message, got=got, want=want, plan=said(plan))


@check("memory", points=1)
def check_casts(student, t):
    "The bf16 copies of autocast, for each micro-batch in flight"
    plan = drawn_plan(t, sharded=False, checkpointing=False)
    same_copies(student, t, plan, Part.CAST_WEIGHTS, "2 bytes for each parameter of the blocks, in flight")
    plan = drawn_plan(t, sharded=False, checkpointing=True)
    same_copies(student, t, plan, Part.CAST_WEIGHTS, "checkpointing frees them, two blocks remain")


@check("memory", points=1)
def check_gathered(student, t):
    "The gathered parameters of a sharded plan"
    same_copies(
        student, t, drawn_plan(t, sharded=True), Part.UNITS, "a pipeline keeps 6 bytes for each that it owns"
    )
    why = "4 bytes for each of two blocks and the larger of a block and a table, 1/t of them"
    same_copies(student, t, drawn_plan(t, sharded=True, pp=1), Part.UNITS, why)


def same_waiting(student, t, plan: dict, why: str, last: bool = False) -> None:
    config, batch, seq = drawn_config(t), batch_of(t, plan), 64 * t.integer(1, 4) * t.integer(2, 4)
    m, rank = batch // plan["dp"] // plan["micro_batch"], plan["pp"] - 1 if last else 0
    flight = in_flight(plan["pp"], m, plan["chunks"], rank) if plan["pp"] > 1 else 1
    want = kept_by_a_block(config, plan, batch, seq) * config.num_layers // plan["pp"] * flight
    got = part_of(student, t, "waiting", config, plan, batch, seq, last)
    message = (
        '"waiting" is {got:,.0f}, the planner and the table of the schedule have {want:,.0f} ({plan}): ' + why
    )
    t.that(near(got, want, 0.08), message, got=got, want=want, plan=said(plan))


@check("memory", points=1)
def check_waiting(student, t):
    "What waits for its backward, on the first and on the last rank"
    for last in (False, True):
        why = "on rank r of 1F1B min(m, p - r) micro-batches are in flight"
        same_waiting(student, t, drawn_plan(t, checkpointing=False), why, last)


@check("memory", points=1)
def check_stored_inputs(student, t):
    "With checkpointing only the inputs of the blocks wait"
    why = "a block keeps its input: 4 h / t bytes a token, sharded 2 h / t"
    for sharded in (False, True):
        same_waiting(student, t, drawn_plan(t, checkpointing=True, sharded=sharded), why)


@check("memory", points=1)
def check_chunks(student, t):
    "Interleaved 1F1B keeps more in flight"
    why = "min(m v, (v - 1) p + 2 (p - r - 1) + 1) / v micro-batches are in flight"
    same_waiting(student, t, drawn_plan(t, pp=2, chunks=2, checkpointing=False), why)


@check("memory", points=1)
def check_uneven(student, t):
    "The rank with the most blocks decides"
    plan = drawn_plan(t, checkpointing=True, sharded=True, pp=4, chunks=1)
    batch, seq, layers = batch_of(t, plan), 64 * t.integer(1, 4), 4 * t.integer(2, 4)
    small = drawn_config(t, num_layers=layers)
    uneven = drawn_config(t, num_layers=layers - t.integer(1, 3))
    even = drawn_config(t, num_layers=layers)
    for one, other in ((uneven, even), (even, small)):
        parts = [
            part_of(student, t, "waiting", config, plan, batch, seq) / config.hidden
            for config in (one, other)
        ]
        message = (
            "{layers} blocks on {pp} ranks: the fullest one has ⌈L / p⌉ of them, as with {others} blocks; "
            'per feature "waiting" is {got:,.1f} and {want:,.1f}'
        )
        values = {"layers": one.num_layers, "others": other.num_layers, "got": parts[0], "want": parts[1]}
        t.that(near(parts[0], parts[1], 1e-6), message, pp=plan["pp"], **values)


@check("memory", points=1)
def check_working(student, t):
    "What one micro-batch needs for a moment"
    for vocab, checkpointing in ((64 * t.integer(300, 400), False), (64, True)):
        config = drawn_config(t, vocab_size=vocab)
        plan = drawn_plan(t, checkpointing=checkpointing, sharded=False)
        batch, seq = batch_of(t, plan), 64 * t.integer(1, 4) * t.integer(2, 4)
        logits = planned(config, plan, batch, seq, True)[Part.LOGITS_AND_LOSS.value]
        again = kept_by_a_block(config, plan | {"checkpointing": False}, batch, seq) if checkpointing else 0
        got, want = part_of(student, t, "working", config, plan, batch, seq, last=True), max(logits, again)
        message = (
            '"working" of the last rank is {got:,.0f}, the planner has {want:,.0f} ({plan}): '
            "the logits, or a block again"
        )
        t.that(near(got, want, 0.1), message, got=got, want=want, plan=said(plan))


@check("memory", points=1)
def check_first_rank(student, t):
    "The first rank of a pipeline has no logits"
    config, plan = drawn_config(t, vocab_size=64 * t.integer(300, 400)), drawn_plan(t, checkpointing=True)
    batch, seq = batch_of(t, plan), 64 * t.integer(1, 4) * t.integer(2, 4)
    got = part_of(student, t, "working", config, plan, batch, seq)
    want = kept_by_a_block(config, plan | {"checkpointing": False}, batch, seq)
    message = (
        '"working" of the first rank is {got:,.0f}, the planner has {want:,.0f}: only the last '
        "rank has the head"
    )
    t.that(near(got, want, 0.1), message, got=got, want=want)


# -- time


def parts_of(student, t, config, plan, batch, seq, cluster) -> dict[str, float]:
    got = student.step_time(config, plan, batch, seq, cluster)
    return {
        name: entry(t, got, name, "step_time(...)")
        for name in ("compute", "tensor", "bubble", "messages", "data")
    }


def drawn_step(t, per_node: int = 4, **fixed):
    plan = drawn_plan(t, **fixed)
    layers = plan["pp"] * plan["chunks"] * t.integer(2, 4)
    return (
        drawn_config(t, num_layers=layers),
        plan,
        batch_of(t, plan),
        64 * t.integer(1, 3),
        drawn_cluster(t, per_node),
    )


def compute_of(case, layers: int | None = None) -> float:
    """Seconds of the products of a rank, from the counted FLOPs of a forward.

    ``layers``: of a model all of whose stages are as full as the fullest one.
    """
    config, plan, batch, seq, cluster = case
    config = config if layers is None else replace(config, num_layers=layers)
    passes = 4 if plan["checkpointing"] else 3
    flops = passes * forward_flops(config, seq) * batch / plan["dp"] / plan["pp"] / plan["tp"]
    return flops / cluster["flops"]


@check("time", points=1)
def check_compute(student, t):
    "The computation, with and without checkpointing"
    for checkpointing in (False, True):
        case = drawn_step(t, checkpointing=checkpointing)
        got, want = parts_of(student, t, *case)["compute"], compute_of(case)
        message = (
            '"compute" is {got:.3e} s; the weights and heads of a model need {want:.3e} s ({plan}): 6 for '
            "each parameter and token, "
        )
        message += "8 with checkpointing, over p x t GPUs"
        t.that(near(got, want, 0.02), message, got=got, want=want, plan=said(case[1]))


@check("time", points=1)
def check_fullest(student, t):
    "The rank with the most blocks sets the pace"
    config, plan, batch, seq, cluster = drawn_step(t, pp=4, checkpointing=False)
    full = config.num_layers
    uneven = drawn_config(t, num_layers=full - t.integer(1, 3), vocab_size=64)
    case = uneven, plan, batch, seq, cluster
    got, want = parts_of(student, t, *case)["compute"], compute_of(case, layers=full)
    message = (
        '"compute" is {got:.3e} s with {layers} blocks on 4 ranks, as with {full} it is '
        "{want:.3e} s: l = ⌈L / p⌉"
    )
    t.that(near(got, want, 0.02), message, got=got, want=want, layers=uneven.num_layers, full=full)


@check("time", points=1)
def check_tensor_time(student, t):
    "The all-reduces of tensor parallelism, in a node and across nodes"
    for per_node, tp in ((4, t.choice([2, 4])), (2, 4)):
        case = config, plan, batch, seq, cluster = drawn_step(t, per_node, tp=tp)
        blocks, m = config.num_layers // plan["pp"], batch // plan["dp"] // plan["micro_batch"]
        sent = 2 * m * blocks * 4 * ring(plan["micro_batch"] * seq * config.hidden, tp, 2)
        rate = cluster["inside"] if tp <= per_node else min(cluster["inside"], per_node * cluster["between"])
        got, want = parts_of(student, t, *case)["tensor"], sent / rate
        message = (
            '"tensor" is {got:.3e} s, a ring sends for {want:.3e} s (t = {tp}, {per_node} GPUs '
            "in a node): all "
        )
        message += "micro-batches and blocks, elements of 2 bytes, on link(cluster, 1, t)"
        t.that(near(got, want, 1e-6), message, got=got, want=want, tp=tp, per_node=per_node)


@check("time", points=2)
def check_bubble_time(student, t):
    "The bubble of computation and tensor parallelism"
    for chunks in (1, 2):
        case = _, plan, batch, _, _ = drawn_step(t, chunks=chunks)
        got = parts_of(student, t, *case)
        m = batch // plan["dp"] // plan["micro_batch"]
        waits = makespan(plan["pp"], m, chunks) / m - 1
        busy = got["compute"] + got["tensor"]
        t.that(busy > 0, "not tested yet: compute and tensor are 0, see the first checks")
        message = (
            'the bubble is {share:.4f} of "compute" + "tensor", simulated {want:.4f} ({plan}): '
            "(p - 1) / (m v)"
        )
        t.that(
            near(got["bubble"] / busy, waits, 1e-6),
            message,
            share=got["bubble"] / busy,
            want=waits,
            plan=said(plan),
        )


@check("time", points=1)
def check_messages(student, t):
    "The messages between stages"
    for per_node, chunks in ((2, 1), (64, 2)):
        case = config, plan, batch, seq, cluster = drawn_step(t, per_node, chunks=chunks)
        m = batch // plan["dp"] // plan["micro_batch"]
        sent = sum(
            2 * plan["micro_batch"] * seq * config.hidden / plan["tp"]
            for _ in range(m * chunks)
            for _ in range(2)
        )
        rate = cluster["between"] if per_node == 2 else cluster["inside"]
        got, want = parts_of(student, t, *case)["messages"], sent / rate
        message = (
            '"messages" is {got:.3e} s, counted {want:.3e} s ({plan}; {per_node} GPUs in a '
            "node): 2 messages for each "
        )
        message += "micro-batch and chunk, 1/t of an activation, on link(cluster, d t, 2)"
        t.that(near(got, want, 1e-6), message, got=got, want=want, plan=said(plan), per_node=per_node)


@check("time", points=1)
def check_no_messages(student, t):
    "One stage sends no messages"
    got = parts_of(student, t, *drawn_step(t, pp=1))
    t.that(got["compute"] > 0, "not tested yet: compute is 0, see the first check")
    t.that(got["messages"] == 0 and got["bubble"] == 0, "with one stage there are no messages and no bubble")


def same_data(student, t, what: str, passes, **fixed) -> None:
    """``passes``: of m micro-batches, the bytes of an element in the ring, and the "
    "micro-batches that hide them."""
    for slow in (True, False):
        case = config, plan, batch, _seq, cluster = drawn_step(t, 2, dp=t.choice([4, 8]), tp=2, **fixed)
        m, counted = batch // plan["dp"] // plan["micro_batch"], parameters_of(config)
        tables = 2 if plan["pp"] == 1 else 1
        owned = (config.num_layers // plan["pp"] * counted["block"] + tables * counted["table"]) / plan["tp"]
        each, windows = passes(m)
        cluster["between"] = cluster["inside"] / (2e3 if slow else 9)
        cluster["flops"] /= 1 if slow else 1e3
        got = parts_of(student, t, *case)
        hidden = 0.8 * windows * (got["compute"] + got["tensor"]) / m
        want = max(each * ring(owned, plan["dp"], 1) / cluster["between"] - hidden, 0)
        message = '"data" is {got:.3e} s, counted {want:.3e} s ({plan}): ' + what
        t.that(near(got["data"], want, 0.02, 1e-15), message, got=got["data"], want=want, plan=said(plan))


@check("time", points=1)
def check_data(student, t):
    "Copies: an all-reduce in fp32, hidden behind the last backward"
    what = "8 (d - 1) / d bytes for each parameter that a rank owns, less 0.8 of 2/3 of a micro-batch"
    same_data(student, t, what, lambda m: (8, 2 / 3), sharded=False)


@check("time", points=1)
def check_sharded_pipeline(student, t):
    "A sharded pipeline gathers once"
    what = "6 (d - 1) / d bytes for each parameter once a step, less 0.8 of a micro-batch"
    same_data(student, t, what, lambda m: (6, 1), sharded=True)


@check("time", points=1)
def check_sharded_alone(student, t):
    "Sharded without a pipeline: for each micro-batch"
    what = "8 (d - 1) / d bytes for each parameter and micro-batch, less 0.8 of the computation"
    same_data(student, t, what, lambda m: (8 * m, m), sharded=True, pp=1)

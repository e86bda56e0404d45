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


def same_copies(student, t, plan: dict, part: Part, why: str, **sizes) -> None:
    config, batch, seq = drawn_config(t, **sizes), batch_of(t, plan), 64 * t.integer(1, 4)
    got = part_of(student, t, "copies", config, plan, batch, seq)
    want = planned(config, plan, batch, seq, False)[part.value]
    message = '"copies" is {got:,.0f}, the planner has {want:,.0f} ({plan}): ' + why
    t.that(near(got, want, 0.06), message, got=got, want=want, plan=said(plan))


@check("memory", points=1)
def check_casts(student, t):
    "The bf16 copies of autocast, for each micro-batch in flight"
    wide = 64 * t.integer(18, 22)  # a table is no block, and costs less than one
    plan = drawn_plan(t, sharded=False, checkpointing=False)
    why = "2 bytes for each parameter of the blocks, in flight"
    same_copies(student, t, plan, Part.CAST_WEIGHTS, why, vocab_size=wide)
    plan = drawn_plan(t, sharded=False, checkpointing=True)
    why = "checkpointing frees them, at most two blocks remain"
    for layers in (plan["pp"], 4 * plan["pp"]):
        same_copies(student, t, plan, Part.CAST_WEIGHTS, why, num_layers=layers)
    plan = drawn_plan(t, sharded=False, checkpointing=True, pp=1, tp=1)
    why = "only a pipeline or tensor parallelism frees them"
    same_copies(student, t, plan, Part.CAST_WEIGHTS, why, vocab_size=64)


@check("memory", points=1)
def check_gathered(student, t):
    "The gathered parameters of a sharded plan"
    why = "a pipeline keeps 6 bytes for each that it owns"
    same_copies(student, t, drawn_plan(t, sharded=True), Part.UNITS, why)
    why = "4 bytes for each of two blocks and the larger of a block and a table, 1/t of them"
    for vocab in (64 * t.integer(1, 3), 64 * t.integer(100, 150)):
        same_copies(student, t, drawn_plan(t, sharded=True, pp=1), Part.UNITS, why, vocab_size=vocab)


def same_waiting(student, t, plan: dict, why: str, last: bool = False, m: int = 0) -> None:
    """``m``: the micro-batches of a pipeline; 0 for more than stages."""
    layers = plan["pp"] * plan["chunks"] * t.integer(2, 3)
    config, seq = drawn_config(t, num_layers=layers), 64 * t.integer(1, 6)
    batch = plan["dp"] * plan["micro_batch"] * m or batch_of(t, plan)
    m, rank = batch // plan["dp"] // plan["micro_batch"], plan["pp"] - 1 if last else 0
    flight = in_flight(plan["pp"], m, plan["chunks"], rank) if plan["pp"] > 1 else 1
    want = kept_by_a_block(config, plan, batch, seq) * config.num_layers // plan["pp"] * flight
    got = part_of(student, t, "waiting", config, plan, batch, seq, last)
    message = (
        '"waiting" is {got:,.0f}, the planner and the table of the schedule have '
        "{want:,.0f} ({plan}, {m} micro-"
        "batches): " + why
    )
    t.that(near(got, want, 0.03), message, got=got, want=want, plan=said(plan), m=m)


@check("memory", points=1)
def check_waiting(student, t):
    "What waits for its backward, on the first and on the last rank"
    why = "on rank r of 1F1B min(m, p - r) micro-batches are in flight"
    for last in (False, True):
        same_waiting(student, t, drawn_plan(t, checkpointing=False), why, last)
    same_waiting(student, t, drawn_plan(t, checkpointing=False, pp=4, micro_batch=2), why, m=t.integer(2, 3))


@check("memory", points=1)
def check_kept(student, t):
    "What a block keeps, with and without sharding and tensor parallelism"
    why = "a = 4 + 12 / t if sharded; 26 for t = 1 and 16 / t + 4 for t > 1 if not"
    for sharded in (False, True):
        for tp in (1, t.choice([2, 4])):
            same_waiting(student, t, drawn_plan(t, checkpointing=False, pp=1, tp=tp, sharded=sharded), why)


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
    for m in (0, 4):
        same_waiting(student, t, drawn_plan(t, pp=4, chunks=2, checkpointing=False), why, m=m)


@check("memory", points=1)
def check_uneven(student, t):
    "The rank with the most blocks decides"
    for chunks in (1, 2):
        plan = drawn_plan(t, checkpointing=True, sharded=True, pp=4, chunks=chunks)
        full, config = 8 * chunks, drawn_config(t)
        batch, seq, layers = batch_of(t, plan), 64 * t.integer(1, 4), full - t.integer(1, 4 * chunks - 1)
        parts = [
            part_of(student, t, "waiting", replace(config, num_layers=each), plan, batch, seq)
            for each in (layers, full, 4 * chunks)
        ]
        grows = parts[1] > 0 and near(2 * parts[2], parts[1], 1e-6)
        t.that(grows, "not tested yet: twice the blocks keep twice as much, see the checks above")
        message = (
            "{layers} blocks on 4 ranks with {chunks} chunk(s) each: the fullest rank has "
            "most_blocks(...), as "
            'with {full} blocks; "waiting" is {got:,.0f} and {want:,.0f}'
        )
        values = {"layers": layers, "full": full, "chunks": chunks, "got": parts[0], "want": parts[1]}
        t.that(near(parts[0], parts[1], 1e-6), message, **values)


def same_working(student, t, vocab: int, last: bool, why: str, **fixed) -> None:
    config, plan = drawn_config(t, vocab_size=vocab), drawn_plan(t, sharded=False, **fixed)
    batch, seq = batch_of(t, plan), 64 * t.integer(2, 6)
    logits = planned(config, plan, batch, seq, last)[Part.LOGITS_AND_LOSS.value]
    stored = plan["checkpointing"]
    again = kept_by_a_block(config, plan | {"checkpointing": False}, batch, seq) if stored else 0
    got, want = part_of(student, t, "working", config, plan, batch, seq, last), max(logits, again)
    values = {"got": got, "want": want, "plan": said(plan), "which": "last" if last else "first"}
    message = '"working" of the {which} rank is {got:,.0f}, the planner has {want:,.0f} ({plan}): ' + why
    t.that(near(got, want, 0.1), message, **values)


@check("memory", points=1)
def check_working(student, t):
    "What one micro-batch needs for a moment"
    why = "the logits, or a block again, whichever is larger"
    same_working(student, t, 64 * t.integer(300, 400), True, why, checkpointing=False)
    same_working(student, t, 64, True, why, checkpointing=True)
    same_working(student, t, 64 * t.integer(20, 30), True, why, checkpointing=True)


@check("memory", points=1)
def check_first_rank(student, t):
    "Logits are on the rank with the head"
    why = "only the last rank of a pipeline has the head"
    same_working(student, t, 64 * t.integer(300, 400), False, why, checkpointing=True)
    why = "with one stage, every rank has the head"
    same_working(student, t, 64 * t.integer(300, 400), False, why, checkpointing=False, pp=1)


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
        "{want:.3e} s: most_blocks(...)"
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
    for per_node, chunks, dp in ((2, 1, t.choice([2, 4])), (64, 2, t.choice([2, 4])), (8, 1, 8)):
        case = config, plan, batch, seq, cluster = drawn_step(t, per_node, chunks=chunks, dp=dp)
        m = batch // plan["dp"] // plan["micro_batch"]
        sent = sum(
            2 * plan["micro_batch"] * seq * config.hidden / plan["tp"]
            for _ in range(m * chunks)
            for _ in range(2)
        )
        rate = 0.25 * (cluster["inside"] if per_node == 64 else cluster["between"])
        got, want = parts_of(student, t, *case)["messages"], sent / rate
        message = (
            '"messages" is {got:.3e} s, counted {want:.3e} s ({plan}; {per_node} GPUs in a '
            "node): 2 messages for each "
        )
        message += "micro-batch and chunk, 1/t of an activation, on MESSAGES of link(cluster, d t, 2)"
        t.that(near(got, want, 1e-6), message, got=got, want=want, plan=said(plan), per_node=per_node)


@check("time", points=1)
def check_no_messages(student, t):
    "One stage sends no messages"
    case = drawn_step(t, pp=1, checkpointing=False)
    got = parts_of(student, t, *case)
    t.that(
        near(got["compute"], compute_of(case), 0.02), "not tested yet: compute is wrong, see the first check"
    )
    t.that(got["messages"] == 0 and got["bubble"] == 0, "with one stage there are no messages and no bubble")


def same_data(student, t, what: str, passes, **fixed) -> None:
    """``passes``: of m micro-batches, the bytes of an element and the micro-batches that hide them.

    The rates are chosen such that as many seconds are hidden as not, or that all are hidden.
    """
    for times in (2.0, 0.5):
        case = drawn_step(t, 2, dp=t.choice([4, 8]), tp=2, micro_batch=t.integer(3, 5), **fixed)
        config, plan, batch, _, cluster = case
        m, counted = batch // plan["dp"] // plan["micro_batch"], parameters_of(config)
        tables = 2 if plan["pp"] == 1 else 1
        owned = (config.num_layers // plan["pp"] * counted["block"] + tables * counted["table"]) / plan["tp"]
        each, windows = passes(m)
        sent = each * ring(owned, plan["dp"], 1)
        case = (*case[:3], 64 * t.integer(8, 10), cluster)
        first = parts_of(student, t, *case)
        t.that(first["tensor"] > 0 and first["compute"] > 0, "not tested yet: see the first checks")
        cluster["flops"] *= first["compute"] / first["tensor"]  # both take as long
        hidden = 0.8 * windows * 2 * first["tensor"] / m
        cluster["between"] = min(sent / (times * hidden), cluster["inside"])
        got = parts_of(student, t, *case)
        hidden = 0.8 * windows * (got["compute"] + got["tensor"]) / m
        want = max(sent / cluster["between"] - hidden, 0)
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

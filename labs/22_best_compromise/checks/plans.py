"""The visible checks of the memory and the time of a plan."""

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, is_near, near
from dlo_lib.models.counts import forward_flops_per_token
from dlo_lib.profiling import Part

from .twins import drawn_plan, drawn_rank, drawn_step, in_flight, kept_by, makespan, owned_by, planned, ring

# -- memory


def part_of(student, t, name: str, case: tuple, last: bool = False) -> float:
    return entry(t, student.rank_memory(*case, last), name, "rank_memory(...)")


def same_memory(student, t, name, want, why, case, rtol=0.005, last=False, **values) -> None:
    """The student's part ``name`` of the first or last rank is ``want``, which is counted or planned."""
    got, which = part_of(student, t, name, case, last), "last" if last else "first"
    message = '"{name}" of the {which} rank is {got:,.0f}, the twin has {want:,.0f} ({plan}): ' + why
    is_near(t, got, want, message, rtol=rtol, name=name, which=which, plan=said(case[1]), **values)


def said(plan: dict) -> str:
    """A plan in a few words, for a message."""
    names = [f"{name} {int(value)}" for name, value in plan.items() if value > 1 or value is True]
    return ", ".join(names).replace("sharded 1", "sharded").replace("checkpointing 1", "checkpointing")


@check("memory", points=1)
def check_state(student, t):
    "The state of a stage, 16 bytes for each parameter"
    for last in (False, True):
        case = drawn_rank(t, drawn_plan(t, sharded=False))
        why = "blocks and one table of the stage, 1/t of them"
        same_memory(student, t, "state", 16 * owned_by(*case[:2]), why, case, last=last)


@check("memory", points=1)
def check_state_of_one(student, t):
    "One stage has both tables"
    case = drawn_rank(t, drawn_plan(t, pp=1, sharded=False))
    why = "with one stage a rank has embedding and head"
    same_memory(student, t, "state", 16 * owned_by(*case[:2]), why, case)


@check("memory", points=1)
def check_sharded(student, t):
    "A sharded plan divides the state over the copies"
    case = config, plan, *_ = drawn_rank(t, drawn_plan(t, sharded=True))
    want = 16 * owned_by(config, plan) / plan["dp"]
    same_memory(student, t, "state", want, "each of the d copies keeps 1/d", case)


def same_copies(student, t, plan: dict, part: Part, why: str, **sizes) -> None:
    case = drawn_rank(t, plan, **sizes)
    same_memory(student, t, "copies", planned(*case, False)[part.value], why, case, rtol=0.06)


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
    config, _, batch, seq = drawn_rank(t, plan, num_layers=plan["pp"] * plan["chunks"] * t.integer(2, 3))
    batch = plan["dp"] * plan["micro_batch"] * m or batch
    m, rank = batch // plan["dp"] // plan["micro_batch"], plan["pp"] - 1 if last else 0
    flight = in_flight(plan["pp"], m, plan["chunks"], rank) if plan["pp"] > 1 else 1
    case = config, plan, batch, seq
    want = kept_by(*case) * config.num_layers // plan["pp"] * flight
    same_memory(student, t, "waiting", want, why + " (m = {m})", case, rtol=0.03, last=last, m=m)


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
        full, plan = 8 * chunks, drawn_plan(t, checkpointing=True, sharded=True, pp=4, chunks=chunks)
        config, *rest = drawn_rank(t, plan, num_layers=full)
        small = replace(config, num_layers=full // 2)
        half, want = (part_of(student, t, "waiting", (each, *rest)) for each in (small, config))
        grows = want > 0 and near(2 * half, want)
        t.that(grows, "not tested yet: twice the blocks keep twice as much, see the checks above")
        layers = full - t.integer(1, 4 * chunks - 1)
        case = replace(config, num_layers=layers), *rest
        why = "{layers} blocks on 4 ranks take as much as {full}: the fullest rank has most_blocks(...)"
        same_memory(student, t, "waiting", want, why, case, rtol=1e-6, layers=layers, full=full)


def same_working(student, t, vocab: int, last: bool, why: str, **fixed) -> None:
    case = drawn_rank(t, drawn_plan(t, sharded=False, **fixed), vocab_size=vocab)
    config, plan, *rest = case
    again = kept_by(config, plan | {"checkpointing": False}, *rest) if plan["checkpointing"] else 0
    want = max(planned(*case, last)[Part.LOGITS_AND_LOSS.value], again)
    same_memory(student, t, "working", want, why, case, rtol=0.1, last=last)


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


def parts_of(student, t, case: tuple) -> dict[str, float]:
    got, names = student.step_time(*case), ("compute", "tensor", "bubble", "messages", "data")
    return {name: entry(t, got, name, "step_time(...)") for name in names}


def same_time(t, parts: dict, name: str, want, why: str, case: tuple, rtol=1e-6, **values) -> None:
    """The student's part ``name`` of a step is ``want`` seconds."""
    message = '"{name}" is {got:.3e} s, counted {want:.3e} s ({plan}): ' + why
    values |= {"name": name, "plan": said(case[1])}
    is_near(t, parts[name], want, message, rtol=rtol, atol=1e-15, **values)


def micro_batches(case: tuple) -> int:
    _, plan, batch, *_ = case
    return batch // plan["dp"] // plan["micro_batch"]


def compute_of(case: tuple, layers: int | None = None) -> float:
    """Seconds of the products of a rank, from the counted FLOPs of a forward.

    ``layers``: of a model all of whose stages are as full as the fullest one.
    """
    config, plan, batch, seq, cluster = case
    config = replace(config, num_layers=layers or config.num_layers)
    tokens, passes = seq * batch / plan["dp"], 4 if plan["checkpointing"] else 3
    flops = passes * forward_flops_per_token(config, seq) * tokens
    return flops / plan["pp"] / plan["tp"] / cluster["flops"]


@check("time", points=1)
def check_compute(student, t):
    "The computation, with and without checkpointing"
    why = "6 for each parameter and token, 8 with checkpointing, over p x t GPUs"
    for checkpointing in (False, True):
        case = drawn_step(t, checkpointing=checkpointing)
        same_time(t, parts_of(student, t, case), "compute", compute_of(case), why, case, rtol=0.02)


@check("time", points=1)
def check_fullest(student, t):
    "The rank with the most blocks sets the pace"
    config, *rest = drawn_step(t, pp=4, checkpointing=False)
    full, layers = config.num_layers, config.num_layers - t.integer(1, 3)
    case = replace(config, num_layers=layers, vocab_size=64), *rest
    why = "{layers} blocks on 4 ranks take as long as {full}, as with most_blocks(...)"
    want = compute_of(case, layers=full)
    same_time(t, parts_of(student, t, case), "compute", want, why, case, rtol=0.02, layers=layers, full=full)


@check("time", points=1)
def check_tensor_time(student, t):
    "The all-reduces of tensor parallelism, in a node and across nodes"
    why = "all micro-batches and blocks, 2 bytes an element, on link(cluster, 1, t); {per_node} GPUs a node"
    for per_node, tp in ((4, t.choice([2, 4])), (2, 4)):
        case = config, plan, _, seq, cluster = drawn_step(t, per_node, tp=tp)
        times = micro_batches(case) * config.num_layers // plan["pp"]
        sent = 2 * times * 4 * ring(plan["micro_batch"] * seq * config.hidden, tp, 2)
        rate = cluster["inside"] if tp <= per_node else min(cluster["inside"], per_node * cluster["between"])
        same_time(t, parts_of(student, t, case), "tensor", sent / rate, why, case, per_node=per_node)


@check("time", points=2)
def check_bubble_time(student, t):
    "The bubble of computation and tensor parallelism"
    message = "the bubble is {got:.4f} of compute and tensor, simulated {want:.4f} ({plan}): (p - 1) / (m v)"
    for chunks in (1, 2):
        case = _, plan, *_ = drawn_step(t, chunks=chunks)
        got, m = parts_of(student, t, case), micro_batches(case)
        busy = got["compute"] + got["tensor"]
        t.that(busy > 0, "not tested yet: compute and tensor are 0, see the first checks")
        waits = makespan(plan["pp"], m, chunks) / m - 1
        is_near(t, got["bubble"] / busy, waits, message, plan=said(plan))


@check("time", points=1)
def check_messages(student, t):
    "The messages between stages"
    why = "2 for each micro-batch and chunk, 1/t of an activation, on MESSAGES of link(cluster, d t, 2)"
    for per_node, chunks, dp in ((2, 1, t.choice([2, 4])), (64, 2, t.choice([2, 4])), (8, 1, 8)):
        case = config, plan, _, seq, cluster = drawn_step(t, per_node, chunks=chunks, dp=dp)
        each = 2 * plan["micro_batch"] * seq * config.hidden / plan["tp"]
        sent = sum(each for _ in range(micro_batches(case) * chunks) for _ in ("forward", "backward"))
        rate = 0.25 * (cluster["inside"] if per_node == 64 else cluster["between"])
        same_time(t, parts_of(student, t, case), "messages", sent / rate, why, case)


@check("time", points=1)
def check_no_messages(student, t):
    "One stage sends no messages"
    case = drawn_step(t, pp=1, checkpointing=False)
    got = parts_of(student, t, case)
    right = near(got["compute"], compute_of(case), 0.02)
    t.that(right, "not tested yet: compute is wrong, see the first check")
    t.that(got["messages"] == 0 and got["bubble"] == 0, "with one stage there are no messages and no bubble")


def same_data(student, t, why: str, passes, **fixed) -> None:
    """``passes``: of m micro-batches, the bytes of an element and the micro-batches that hide them.

    The rates are chosen such that as many seconds are hidden as not, or that all are hidden.
    """
    for times in (2.0, 0.5):
        case = drawn_step(t, 2, dp=t.choice([4, 8]), tp=2, micro_batch=t.integer(3, 5), **fixed)
        config, plan, batch, _, cluster = case
        each, windows = passes(m := micro_batches(case))
        sent = each * ring(owned_by(config, plan), plan["dp"], 1)
        case = config, plan, batch, 64 * t.integer(8, 10), cluster
        first = parts_of(student, t, case)
        t.that(first["tensor"] > 0 and first["compute"] > 0, "not tested yet: see the first checks")
        cluster["flops"] *= first["compute"] / first["tensor"]  # both take as long
        hidden = 0.8 * windows * 2 * first["tensor"] / m
        cluster["between"] = min(sent / (times * hidden), cluster["inside"])
        got = parts_of(student, t, case)
        hidden = 0.8 * windows * (got["compute"] + got["tensor"]) / m
        same_time(t, got, "data", max(sent / cluster["between"] - hidden, 0), why, case, rtol=0.02)


@check("time", points=1)
def check_data(student, t):
    "Copies: an all-reduce in fp32, hidden behind the last backward"
    why = "8 (d - 1) / d bytes for each parameter that a rank owns, less 0.8 of 2/3 of a micro-batch"
    same_data(student, t, why, lambda m: (8, 2 / 3), sharded=False)


@check("time", points=1)
def check_sharded_pipeline(student, t):
    "A sharded pipeline gathers once"
    why = "6 (d - 1) / d bytes for each parameter once a step, less 0.8 of a micro-batch"
    same_data(student, t, why, lambda m: (6, 1), sharded=True)


@check("time", points=1)
def check_sharded_alone(student, t):
    "Sharded without a pipeline: for each micro-batch"
    why = "8 (d - 1) / d bytes for each parameter and micro-batch, less 0.8 of the computation"
    same_data(student, t, why, lambda m: (8 * m, m), sharded=True, pp=1)

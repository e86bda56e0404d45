"""The visible checks of the whole: hooks at the right moment, the full state, and training against one
process.

Traffic is counted outside the student's process; bytes are exact, padding included. Memory is read from
outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dlo_lib.comm.calls import Call
from dlo_lib.grading.checks.contract import Kind, Nudge, check
from dlo_lib.labkit.compare import every_rank, same, wrong_if
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.order import comes_before, first_difference
from dlo_lib.labkit.traffic import (
    passes_at_most,
    passes_exactly,
    passes_only,
    sends_one_of,
    uses_what_arrives,
)
from dlo_lib.models.llama import Block

from . import scenarios, twins
from .gathering import EXACT, GRADIENTS, ROOM, ROWS, gathers_rows, reduces_gradients
from .twins import Batch, expected_units, llama, packed_bytes, rows_of

TINY = {
    "vocab_size": 11,
    "hidden": 6,
    "intermediate": 10,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
}
FORWARD, BACKWARD, ALL = ["forward"], ["forward", "backward"], ["forward", "backward", "end"]
ROOM_OF_LIBRARY = 1.5 * MIB  # fully_shard needs 0.8 MiB besides its tensors

# -- the order of a step

# Units have messages of different sizes. Each block makes a small all-reduce while it computes, in forward
# and in backward: so the order of calls shows which unit was gathered before which block computed.
WORDS = {Kind.ALL_GATHER: "gather", Kind.REDUCE_SCATTER: "reduce"}
SMALL = 4  # bytes of a computing block's all-reduce


def _unit(number: int) -> str:
    return f"block {number}" if number else "root"


def described(calls: Sequence[Call], sizes: Sequence[int]) -> list[str]:
    """The calls in words; ``sizes``: bytes of the packed root and blocks."""
    names = {size: _unit(number) for number, size in enumerate(sizes)}
    blocks = list(range(1, len(sizes)))
    computing = iter([*blocks, *reversed(blocks)])
    return [
        f"compute {_unit(next(computing, 0))}"
        if call.kind is Kind.ALL_REDUCE and call.payload_bytes == SMALL
        else f"{WORDS.get(call.kind, call.kind.value)} "
        + names.get(call.payload_bytes, f"{call.payload_bytes} bytes")
        for call in calls
    ]


def expected_order(blocks: int) -> list[str]:
    """A step in which the root is always whole, and one block at a time."""
    units = [_unit(number) for number in range(1, blocks + 1)]
    forward = [f"{word} {unit}" for unit in units for word in ("gather", "compute")]
    backward = [f"{word} {unit}" for unit in reversed(units) for word in ("gather", "compute", "reduce")]
    return ["gather root", *forward, *backward, "reduce root"]


def explain(got: Sequence[str], want: Sequence[str], blocks: int) -> str:
    """Name the mistake in ``got``."""
    units = [_unit(number) for number in range(blocks + 1)]
    strange = [step for step in got if step.split()[0] not in ("gather", "compute", "reduce")]
    after, found, right = first_difference(got, want)
    where = f"After '{after}' comes '{found}' instead of '{right}'."
    for unit in units:
        times, most = got.count(f"gather {unit}"), want.count(f"gather {unit}")
        if times > most:
            return f"gathered twice: {unit} was gathered {times} times in a step, {most} is enough. {where}"
    if strange:
        return f"a gradient or parameter was communicated un-sharded: '{strange[0]}'. {where}"
    if odd := [step for step in got if "bytes" in step]:
        return f"a message is not a packed unit: '{odd[0]}'. {where}"
    if comes_before(got, f"gather {units[-1]}", f"compute {units[1]}"):
        return f"gathers everything at once: the last block is gathered before the first computes. {where}"
    if kept := [unit for unit in units[1:] if got.count(f"gather {unit}") == 1]:
        return (
            f"never freed: {kept[0]} was gathered once, so it stayed whole from forward to backward. {where}"
        )
    if missing := [step for step in want if step not in got]:
        return f"'{missing[0]}' is missing. {where}"
    if found.startswith("gather") and right.startswith("reduce"):
        early = "three units are whole: the next block is gathered before the last one is reduced and freed"
        cause = "watch_input should register its hook on arg.view_as(arg), and return that tensor"
        return f"{early}. {cause}. {where}"
    return f"the order is wrong. {where}"


# -- models


def whole_state_of(t, sizes: dict, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Weights of a small Llama, tied ones under all their names."""
    shapes = {name: value.shape for name, value in llama(sizes, device="meta").state_dict().items()}
    state = {name: t.normal(*shape, dtype=dtype) / 3 for name, shape in shapes.items()}
    return {**state, "lm_head.weight": state["embed_tokens.weight"]} if sizes["tied_embeddings"] else state


def batch_of(t, rows: int, seq: int, ignored: int = 0) -> Batch:
    """Tokens and targets, some of which do not count."""
    tokens, targets = (t.integers(0, TINY["vocab_size"] - 1, rows, seq) for _ in range(2))
    targets.view(-1)[:ignored] = -100
    return tokens, targets


def unit_names(sizes: dict) -> list[list[list[str]]]:
    """All names of each parameter of each unit of a Llama."""
    return [names for _, names in expected_units(sizes, Block)]


def by_unit(sizes: dict, values: dict[str, Tensor]) -> list[list[Tensor]]:
    """The tensors of each unit that has some, for tensors by the first name of the parameter."""
    units = ([values[same[0]] for same in names if same[0] in values] for names in unit_names(sizes))
    return [unit for unit in units if unit]


def same_llama(student, t, world: int, frozen: list[str], batches: int = 1) -> None:
    """Losses and gradients of all ranks are those of one process."""
    sizes = {**TINY, "tied_embeddings": True}
    state = whole_state_of(t, sizes)
    own = [[batch_of(t, t.integer(1, 3), 4) for _ in range(batches)] for _ in range(world)]
    fixed = {"sizes": sizes, "state": state, "frozen": frozen}
    run = student.ranks(scenarios.backward_of_llama, [{**fixed, "batches": mine} for mine in own])
    losses, grads = twins.whole_gradients(sizes, state, frozen, [batch for mine in own for batch in mine])
    for rank, (got, shards) in enumerate(run.results):
        exact = {"rtol": 1e-9, "atol": 1e-10, "rank": rank, "world": world}
        want = losses[rank * batches : (rank + 1) * batches]
        same(t, got, want, "the loss of rank {rank} of {world}", **exact)
        what = "the gradient of {name} on rank {rank} of {world}"
        message = (
            what + " is missing after torch.autograd.backward(loss): the function that queue_end queues must "
            "reduce what is left"
        )
        for name in grads:
            t.that(shards.get(name) is not None, message, name=name, rank=rank, world=world)
        rows = {name: rows_of(batches * right, rank, world) for name, right in grads.items()}
        same(t, shards, rows, what, **exact)
        message = "a frozen parameter has a gradient on rank {rank}"
        t.that(all(shards.get(name) is None for name in frozen), message, rank=rank)
    message = "rank {rank} used {kinds} too: a step needs gathers and reduce-scatters only"
    passes_only(t, run, WORDS, message)
    gathers_rows(t, run, by_unit(sizes, state))
    alone = [[twins.whole_gradients(sizes, state, frozen, [batch])[1] for batch in mine] for mine in own]
    reduces_gradients(t, run, [[unit for one in mine for unit in by_unit(sizes, one)] for mine in alone])


# -- layers


def layers_case(t, world: int, blocks: int, dtype: torch.dtype = torch.float64):
    """The matrices of root and layers, all of different sizes, and each rank's input."""
    widths = [3, *(4 + 2 * i + t.integer(0, 1) for i in range(blocks + 1))]
    tensors = [t.normal(a, b, dtype=dtype) / 2 for a, b in pairwise(widths)]
    return tensors, [t.normal(2, 3, dtype=dtype) for _ in range(world)]


def inputs_of(tensors: list[Tensor], xs: list[Tensor], **others) -> list[dict]:
    """The inputs of a scenario of layers on each rank."""
    return [{"first": tensors[0], "weights": tensors[1:], "x": x, **others} for x in xs]


def same_layers(
    t, run, tensors: list[Tensor], xs: list[Tensor], times: int, backward: bool = True
) -> list[int]:
    """Outputs and gradients after ``times`` steps are those of one process; the bytes of each packed unit."""
    world, blocks = len(xs), len(tensors) - 1
    outputs, grads = twins.layered(tensors, xs)
    for rank, (got, shards, *_) in enumerate(run.results):
        last = t.items(got, times, "the outputs")[-1]
        t.close(last, outputs[rank], "the output of rank {rank}", rank=rank, rtol=1e-9)
        for i, mine in enumerate(t.items(shards, blocks + 1, "the gradients") if backward else []):
            what = "the gradient of {unit} on rank {rank} of {world}, after {times} steps"
            values = {"unit": _unit(i), "rank": rank, "world": world, "times": times}
            t.that(mine is not None, what + " is missing", **values)
            t.close(mine, rows_of(times * grads[i], rank, world), what, **values, rtol=1e-9, atol=1e-12)
    gathers_rows(t, run, [[tensor] for tensor in tensors])
    reduces_gradients(t, run, [[[grad] for grad in twins.layered(tensors, [x])[1]] for x in xs])
    return [packed_bytes([tensor], world, 8) for tensor in tensors]


def hooked_run(student, t, world: int, blocks: int, parts: list[str], times: int = 1, watched=True):
    """Steps by the hooks of these exercises, compared with one process; the run, and each unit's bytes.
    ``watched``: an error names a unit that has memory too long."""
    tensors, xs = layers_case(t, world, blocks)
    inputs = inputs_of(tensors, xs, parts=parts, times=times, watched=watched)
    run = student.ranks(scenarios.hooked, inputs)
    return run, same_layers(t, run, tensors, xs, times, "backward" in parts)


def leaves_no_unit(t, run, parts: list[str]) -> None:
    """At the end no unit has memory, without backward only the root; a storage stays the same."""
    for rank, (_, _, left, moved) in enumerate(run.results):
        allowed = "no unit" if "backward" in parts else "the root"
        message = "never freed: at the end {left} of rank {rank} still has memory. Call reshard(unit)"
        t.that(left == allowed, message, left=left, rank=rank)
        message = "a whole parameter has another storage than at the beginning: autograd may have saved that"
        t.that(not moved, message)


def large_run(student, t, count: int, parts: list[str] | None):
    """A step of large layers by hooks, or by ``shard_model``; the run, and the bytes of a rank's rows and of
    a whole unit.

    A number of the root is changed on its way to a rank, which shows in the loss and the gradients of this
    rank: so it computes with what it receives.
    """
    seed, width, rank, by = t.integer(0, 999), 1024 if count > 1 else 1792, t.integer(0, 1), 30.0
    place, losses, sums, first, sent = twins.large_layers(seed, width, count + 1, rank, by)
    nudge, inputs = (
        Nudge(Kind.ALL_GATHER, rank, element=place, by=by),
        {"seed": seed, "width": width, "count": count},
    )
    if parts is None:
        run = student.ranks(scenarios.large_sharded, [inputs] * 2, nudge=nudge)
    else:
        run = student.ranks(scenarios.large_hooked, [{**inputs, "parts": parts}] * 2, nudge=nudge)
    what = "the loss, where a number of the root is changed on its way to rank {to}"
    want = [torch.tensor(loss) for loss in losses]
    every_rank(t, run, want, what, lambda result: result[0], rtol=1e-3, to=rank)
    for i, want in enumerate(sums if parts != FORWARD else []):
        found = [t.items(shards, count + 1, "the gradients")[i] for _, shards in run.results]
        t.that(all(own is not None for own in found), "the gradient of {unit} is missing", unit=_unit(i))
        got = sum(float(t.tensor(own, "the sum of gradient {i}", i=i, shape=())) for own in found)
        t.close(got, want, "the sum of gradient {i}", i=i, rtol=2e-2, atol=1e-4)
    sends_one_of(t, run, Kind.ALL_GATHER, list(zip(*first)), ROWS)
    sends_one_of(t, run, Kind.REDUCE_SCATTER, sent, GRADIENTS, rtol=1e-2, divided=2)
    whole = 4 * width**2
    return run, (count + 1) * whole / 2, whole


# -- forward


@check("forward", points=2, seconds=30)
def check_forward_order(student, t):
    "Each unit is gathered before it computes, and the root stays whole for backward"
    blocks = t.integer(3, 4)
    run, sizes = hooked_run(student, t, 2, blocks, FORWARD)
    want = expected_order(blocks)[: 1 + 2 * blocks]
    message = (
        "the root is freed after a forward that a backward follows, and is gathered again at once: free it "
        "only without backward"
    )
    for rank in range(run.world):
        got = described(run.calls(rank), sizes)
        t.that(got != [*want, "gather root"], message)
        t.that(got == want, explain(got, want, blocks))
    leaves_no_unit(t, run, FORWARD)


@check("forward", points=1, seconds=30)
def check_freed_after_forward(student, t):
    "After forward only the root is whole: the memory of each process"
    run, row, whole = large_run(student, t, 3, FORWARD)
    message = (
        "never freed: after forward rank {rank} holds {held:.0f} MiB, but its rows and the whole root have "
        "{want:.0f}: after_forward must free each block"
    )
    most = row + whole
    holds_at_most(t, run, "after forward", most + ROOM, message, want=most / MIB)
    message = (
        "freed too late: in the forward of block 3 rank {rank} holds {held:.0f} MiB, but its rows and two "
        "whole units, the root and this block, have {want:.0f}: after_forward of the blocks before must "
        "free their memory at once"
    )
    most = row + 2 * whole
    holds_at_most(t, run, "in forward", most + ROOM, message, want=most / MIB)


@check("forward", points=1, seconds=40)
def check_inference(student, t):
    "Without gradients every unit is freed, and the next forward sees new weights"
    tensors, xs = layers_case(t, 2, 2)
    factors = [t.uniform(1.2, 1.6) for _ in range(2)]
    run = student.ranks(scenarios.hooked_without_gradients, inputs_of(tensors, xs, factors=factors))
    first = [factors[0] * tensor for tensor in tensors]
    second = [factors[1] * tensor for tensor in first]
    stale, _ = twins.layered([first[0], *second[1:]], xs)
    old = (
        "The second forward used old weights of the root: without gradients there is no backward that frees "
        "it, so after_forward must free it."
    )
    for rank, wants in enumerate(zip(twins.layered(first, xs)[0], twins.layered(second, xs)[0])):
        outputs = t.items(run.results[rank], 2, "the outputs")
        wrong_if(t, outputs[1], wants[1], {old: stale[rank]})
        same(t, outputs, wants, "output {i} without gradients, after weights have changed", rtol=1e-9)


@check("forward", points=1, seconds=20)
def check_cast(student, t):
    "Floating-point inputs get the dtype in which the unit computes"
    x, tokens = t.normal(2, 3), t.integers(0, 9, 4)
    inputs = {"weight": t.normal(4, 3), "x": x, "tokens": tokens}
    for got in student.ranks(scenarios.prepared, [inputs] * 2).results:
        args = t.items(got, 4, "what before_forward returns, a tuple,")
        message = "before_forward has cast the tokens, which are integers: cast floating-point tensors only"
        t.that(type(args[1]) is not Tensor or args[1].dtype == tokens.dtype, message)
        t.close(args[0], x.bfloat16(), "the input in compute_dtype (bf16)", **EXACT)
        t.close(args[1], tokens, "the tokens", **EXACT)
        t.that(args[2] is None, "an argument that is no tensor should be unchanged")
        t.close(args[3], (2 * x).bfloat16(), "a later input in compute_dtype (bf16)", **EXACT)


# -- backward


@check("backward", points=3, seconds=40)
def check_order(student, t):
    "Each unit is gathered, freed and reduced at the right time"
    blocks = t.integer(3, 4)
    run, sizes = hooked_run(student, t, 2, blocks, BACKWARD)
    want = expected_order(blocks)
    for rank in range(run.world):
        got = described(run.calls(rank), sizes)
        t.that(got == want, explain(got, want, blocks))
    leaves_no_unit(t, run, BACKWARD)
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1), call=t.integer(1 + blocks, 2 * blocks))


@check("backward", points=2, seconds=40)
def check_gradients(student, t):
    "The shards have the gradients of one process, also after many steps"
    for world, times in ((1, 1), (2, t.integer(5, 12)), (3, 1)):
        run, sizes = hooked_run(student, t, world, t.integer(2, 3), BACKWARD, times, watched=False)
    blocks = len(sizes) - 1
    rank = t.choice((0, 2))  # what comes from rank 2, next to rank 1, may be padding only
    uses_what_arrives(t, run, Kind.ALL_GATHER, rank, call=t.integer(1 + blocks, 2 * blocks))


NEVER_FREED = (
    "never freed: after backward rank {rank} holds {held:.0f} MiB, but rows and their gradients have twice "
    "{row:.0f} MiB: {cure}"
)


@check("backward", points=2, seconds=40)
def check_blocks_at_rest(student, t):
    "After backward no block is whole: the memory of each process"
    count, cure = 3, "the hook of watch_input must free each block"
    run, row, whole = large_run(student, t, count, BACKWARD)
    holds_at_most(t, run, "at the end", 2 * row + ROOM, NEVER_FREED, row=row / MIB, cure=cure)
    message = (
        "freed too late: in the backward of block 1 rank {rank} holds {held:.0f} MiB, but its rows, two "
        "whole units and the gradients of its shards have {want:.0f}: the hook of watch_input must free the "
        "memory of each block at once"
    )
    most = row + 2 * whole + (count - 1) * whole / 2  # the last: the shards' gradients of the blocks after it
    holds_at_most(t, run, "in backward", most + ROOM, message, want=most / MIB)


# -- the end of backward


@check("end", points=3, seconds=60)
def check_same_gradients(student, t):
    "A Llama with tied and frozen weights has the twin's loss and gradients"
    for world in (1, 2, 3):
        same_llama(student, t, world, [f"layers.{t.integer(0, 1)}.mlp.up_proj.weight"])


@check("end", points=1, seconds=40)
def check_frozen_first(student, t):
    "A frozen embedding and a frozen block before trained ones, in two steps"
    block = t.choice([[], ["layers.0.mlp.up_proj.weight"]])
    same_llama(student, t, 2, ["embed_tokens.weight", *block], batches=2)


@check("end", points=1, seconds=40)
def check_mixed_precision(student, t):
    "Computed in bf16, reduced in fp32"
    tensors, xs = layers_case(t, 2, 2, torch.float32)
    inputs = inputs_of(tensors, xs, times=1, compute="bfloat16", reduce="float32")
    run = student.ranks(scenarios.sharded, inputs)
    outputs, grads = twins.layered(tensors, xs, torch.bfloat16)
    for rank, (got, shards) in enumerate(run.results):
        same(t, got, [outputs[rank]], "the output in bf16 on rank {rank}", rank=rank, rtol=3e-2, atol=3e-2)
        for i, mine in enumerate(t.items(shards, len(grads), "the gradients")):
            what, want = (
                "the gradient of {unit} on rank {rank}, in the dtype of its shard",
                rows_of(grads[i], rank, 2),
            )
            t.close(mine, want, what, unit=_unit(i), rank=rank, rtol=3e-2, atol=3e-3)
    sizes = [packed_bytes([tensor], 2, 2) for tensor in tensors]
    half = all(call.payload_bytes in sizes for rank in range(2) for call in run.calls(rank, Kind.ALL_GATHER))
    t.that(half, "With bf16 as compute_dtype, gathers should have half the bytes of fp32.")


def bytes_of_steps(t, run, sizes: list[int], times: int) -> None:
    """Each step gathers the root once and each block twice, and reduces each unit once."""
    root, *blocks = sizes
    message = (
        "in {times} steps rank {rank} gathered {got} bytes; the root once a step, and each block for forward "
        "and for backward, make {want}"
    )
    passes_exactly(t, run, times * (root + 2 * sum(blocks)), message, Kind.ALL_GATHER, times=times)
    message = (
        "In {times} steps rank {rank} reduce-scattered {got} bytes; each unit once a step makes {want}. "
        "Remove each unit that is reduced from pending, and no other one"
    )
    passes_exactly(t, run, times * sum(sizes), message, Kind.REDUCE_SCATTER, times=times)


@check("end", points=2, seconds=30)
def check_step_bytes(student, t):
    "Each step sends the bytes of the formula, and leaves no unit whole"
    times = t.integer(5, 12)
    run, sizes = hooked_run(student, t, 2, t.integer(2, 3), ALL, times)
    bytes_of_steps(t, run, sizes, times)
    leaves_no_unit(t, run, ALL)
    tensors, xs = layers_case(t, 2, 2)  # the same by shard_model
    run = student.ranks(scenarios.sharded, inputs_of(tensors, xs, times=2))
    bytes_of_steps(t, run, same_layers(t, run, tensors, xs, 2), 2)
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1))


@check("end", points=2, seconds=40)
def check_at_rest(student, t):
    "At rest a rank holds 1/N of parameters and gradients: the memory of each process"
    run, row, _ = large_run(student, t, 1, None)
    cure = "the root is freed at the end of backward"
    holds_at_most(t, run, "at the end", 2 * row + ROOM_OF_LIBRARY, NEVER_FREED, row=row / MIB, cure=cure)


# -- the state dict


def state_run(student, t, world: int, compute=None, tied=False, buffer: Tensor | None = None, frozen=""):
    """``full_state`` is the state of the shards, which change after sharding; the run, and the sizes.
    With the name of a frozen parameter: in the second call."""
    sizes = {**TINY, "tied_embeddings": tied}
    state, first = whole_state_of(t, sizes, torch.float32), t.integer(0, 2)
    # no rank knows the rows of the others
    scales = [2.0 ** (1 + (first + rank) % 3) for rank in range(world)]
    fixed = {"sizes": sizes, "state": state, "frozen": [frozen] if frozen else [], "compute": compute}
    inputs = [{**fixed, "buffer": buffer, "scale": scale} for scale in scales]
    run = student.ranks(scenarios.whole_state, inputs)
    scaled = {name: twins.from_ranks([[by * weight] for by in scales])[0] for name, weight in state.items()}
    seen = {} if buffer is None else {"layers.0.seen": buffer}
    before = "{name} on rank {rank} of {world} is that before the shards changed: full_state gathers the rows"
    for rank, (got, _) in enumerate(run.results):
        where = {"rank": rank, "world": world}
        t.that(type(got) is dict, "full_state should return a dict")
        message = "the state of rank {rank} lacks {name}: frozen parameters belong to it"
        t.that(not frozen or frozen in got, message, rank=rank, name=frozen)
        lacks = next((name for name in [*scaled, *seen] if name not in got), "")
        t.that(not lacks, "the state of rank {rank} of {world} lacks {name}", **where, name=lacks)
        what = "{name} in the state of rank {rank} of {world}"
        same(t, got, scaled, what, {before: state}, **EXACT, **where)
        same(t, got, seen, what, **EXACT, **where)
        message = "the state has layers.0.scratch, a buffer that is registered with persistent=False"
        t.that("layers.0.scratch" not in got, message)
        more = sorted({str(name) for name in got} - {*scaled, *seen})[:3]
        t.that(not more, "the state has names that the model lacks: {names}", names=more)
    units = [unit for values in ([scaled, state] if frozen else [scaled]) for unit in by_unit(sizes, values)]
    # All units in one message: another check is for this.
    at_once = [[tensor for unit in by_unit(sizes, values) for tensor in unit] for values in (scaled, state)]
    for kind in (Kind.ALL_GATHER, Kind.BROADCAST):
        gathers_rows(t, run, [*units, *at_once], kind)
    return run, sizes


@check("state", points=2, seconds=40)
def check_state(student, t):
    "Every rank gets the whole state"
    for world in (1, 2, 3):
        run, _ = state_run(student, t, world)
    rank = t.integer(0, 2)
    kind = Kind.ALL_GATHER if run.calls(rank, Kind.ALL_GATHER) else Kind.BROADCAST
    uses_what_arrives(t, run, kind, rank)


@check("state", points=1, seconds=30)
def check_state_is_exact(student, t):
    "With mixed precision the state is that of the shards, not rounded"
    state_run(student, t, 2, compute="bfloat16")


@check("state", points=1, seconds=30)
def check_tied_and_buffers(student, t):
    "Tied parameters under all their names, and the persistent buffers"
    frozen = f"layers.{t.integer(0, 1)}.self_attn.o_proj.weight"
    state_run(student, t, 2, tied=True, buffer=t.normal(3), frozen=frozen)


@check("state", points=1, seconds=30)
def check_unit_by_unit(student, t):
    "One unit at a time"
    run, sizes = state_run(student, t, 2)
    model = llama(sizes, device="meta")
    root = [value for name, value in model.named_parameters() if not name.startswith("layers.")]
    most = max(packed_bytes(unit, 2, 4) for unit in [root, *(block.parameters() for block in model.layers)])
    for rank in range(2):
        message = (
            "full_state gathers everything at once: one gather has {got} bytes, the largest unit {most}. "
            "Gather one unit at a time"
        )
        t.that(run.max_unsharded(rank) <= most, message, got=run.max_unsharded(rank), most=most)
        whole = t.items(run.results[rank], 2, "the state and the whole units")[1]
        message = (
            "full_state leaves units whole: {units}. It needs the packed rows of one unit at a time, and no "
            "whole parameters"
        )
        t.that(not whole, message, units=[_unit(number) for number in whole])
    keeps_one_unit(student, t, count=t.integer(8, 12))


def keeps_one_unit(student, t, count: int) -> None:
    """Memory for the result and few units is enough: the packed one, a copy, what sends and receives it."""
    seed, width, some = t.integer(0, 999), 724, 4
    inputs = {"seed": seed, "width": width, "count": count, "units_at_once": some}
    (got,) = student.ranks(scenarios.large_state, [inputs]).results
    message = (
        "full_state holds the packed rows of several units: memory for its result and {some} of {count} "
        "units is not enough. Clone the weights of a unit, and keep nothing else of it"
    )
    t.that(got != "memory", message, some=some, count=count)
    random = torch.Generator().manual_seed(seed)
    want = {str(i): torch.randn(width, width, generator=random).sum() for i in range(count)}
    same(t, got, want, "the sum of weight {name}", rtol=1e-3, atol=1e-1)


# -- training


def train_run(student, t, own: list[list[list[Batch]]], frozen: list[str], tied=False, kind="AdamW"):
    """Losses and parameters are those of one process, for micro-batches by rank, step and number; the run,
    and the parameters by name."""
    world, steps, micro_batches = len(own), len(own[0]), len(own[0][0])
    sizes = {**TINY, "tied_embeddings": tied}
    state, lr = whole_state_of(t, sizes), 0.01
    fixed = {"sizes": sizes, "state": state, "frozen": frozen, "lr": lr, "kind": kind, "dtype": "float64"}
    run = student.ranks(scenarios.trained, [{**fixed, "steps": mine} for mine in own])
    at_once = [[batch for mine in own for batch in mine[step]] for step in range(steps)]
    losses, values = twins.whole_training(sizes, state, frozen, at_once, lr, kind)
    for rank, (got, shards, _) in enumerate(run.results):
        where = {"rank": rank, "world": world}
        same(t, got, losses, "the loss of step {i} on rank {rank} of {world}", rtol=1e-8, atol=1e-9, **where)
        rows = {name: rows_of(right, rank, world) for name, right in values.items()}
        what = "{name} on rank {rank} of {world} after the last step of the given optimizer, {kind}"
        same(t, shards, rows, what, rtol=1e-7, atol=1e-8, kind=kind, **where)
    if micro_batches == 1:  # what the first step sends
        units, factor = by_unit(sizes, state), world / twins.counted(at_once[0])
        gathers_rows(t, run, units, first=len(units))
        alone = [twins.rank_gradients(sizes, state, frozen, mine[0][0], factor) for mine in own]
        sent = [by_unit(sizes, grads) for grads in alone]
        reduces_gradients(t, run, sent, first=len(sent[0]))
    loss_and_count_only(t, run, steps * (1 + micro_batches))
    return run, values


def loss_and_count_only(t, run, times: int) -> None:
    """Besides gathers and reduce-scatters, a rank passes at most two numbers ``times`` times; the batches of
    the other ranks have more."""
    message = (
        "rank {rank} passes {got} bytes besides gathers and reduce-scatters: a step needs the loss and the "
        "count only, two numbers"
    )
    for rank in range(run.world):
        got = sum(call.payload_bytes for call in run.calls(rank) if call.kind not in WORDS)
        t.that(got <= 16 * times, message, rank=rank, got=got)


@check("train", points=4, seconds=60)
def check_trains(student, t):
    "Steps with unequal batches, tied and frozen weights equal those of one process, and leave no gradient"
    message = "after a step rank {rank} still has a gradient: set every grad to None after optimizer.step()"
    for world, steps in ((2, t.integer(4, 8)), (3, 2)):
        frozen = [f"layers.{t.integer(0, 1)}.self_attn.o_proj.weight"]
        own = [[[batch_of(t, 1 + rank, 32, t.integer(1, 9))] for _ in range(steps)] for rank in range(world)]
        run, _ = train_run(student, t, own, frozen, tied=True)
        for rank, (_, _, left) in enumerate(run.results):
            t.that(not left, message, rank=rank)


@check("train", points=2, seconds=40)
def check_training_traffic(student, t):
    "The bytes of a step are those of the formula"
    frozen = f"layers.{t.integer(0, 1)}.mlp.up_proj.weight"
    run, values = train_run(student, t, [[[batch_of(t, 2, 32)]] for _ in range(2)], [frozen])
    blocks = [value for name, value in values.items() if name.startswith("layers.")]
    trained = [value for name, value in values.items() if name != frozen]
    message = (
        "gathered twice: rank {rank} gathered {got} bytes; the root once, and blocks for forward and "
        "backward, make {want}"
    )
    gathers, kind = packed_bytes([*values.values(), *blocks], 2, 8), Kind.ALL_GATHER
    passes_at_most(t, run, gathers, message, kind)
    passes_exactly(t, run, gathers, "rank {rank} gathered {got} bytes instead of {want}", kind)
    message = "rank {rank} reduce-scattered {got} bytes instead of {want}"
    passes_exactly(t, run, packed_bytes(trained, 2, 8), message, Kind.REDUCE_SCATTER)
    message = (
        "rank {rank} passed {rest} bytes besides gathers and reduce-scatters, but loss and count are two "
        "numbers: is a gradient communicated un-sharded?"
    )
    for rank in range(run.world):
        rest = sum(call.payload_bytes for call in run.calls(rank) if call.kind not in WORDS)
        t.that(rest <= 16, message, rank=rank, rest=rest)
    uses_what_arrives(t, run, Kind.REDUCE_SCATTER)


@check("train", points=2, seconds=60)
def check_micro_batches(student, t):
    "Micro-batches with unequal numbers of targets"
    own = [[[batch_of(t, 2, 32, 45), batch_of(t, 2, 32, 0)]] for _ in range(2)]
    train_run(student, t, own, [], kind="SGD")


@check("train", points=2, seconds=40)
def check_masters(student, t):
    "With mixed precision the loss is computed in fp32, and small updates are kept"
    sizes, lr = {**TINY, "tied_embeddings": False}, 1e-4
    state = whole_state_of(t, sizes, torch.float32)

    def draw() -> list[Batch]:
        return [batch_of(t, 2, 32, t.integer(0, 9)) for _ in range(2)]

    def tells(batches: list[Batch]) -> bool:
        loss, rounded = twins.rounded_losses(sizes, state, batches)
        return all(abs(wrong - loss) > 8e-4 * loss for wrong in rounded)

    batches = t.draw_until(draw, tells)
    fixed = {"sizes": sizes, "state": state, "frozen": [], "lr": lr, "kind": "AdamW", "dtype": "float32"}
    fixed |= {"compute": "bfloat16", "reduce": "float32"}
    run = student.ranks(scenarios.trained, [{**fixed, "steps": [[batch]]} for batch in batches])
    loss_and_count_only(t, run, 2)
    want, (loss, _) = (
        twins.rounded_step(sizes, state, batches, lr),
        twins.rounded_losses(sizes, state, batches),
    )
    for rank, (losses, shards, _) in enumerate(run.results):
        got = t.number(t.items(losses, 1, "the losses")[0], "the loss")
        message = "the loss of rank {rank} is {got}, not {loss}: in bf16 it is rounded. Use logits.float()"
        t.that(abs(got - loss) <= 3e-4 * loss, message, rank=rank, got=got, loss=loss)
        off = []
        for name, value in want.items():
            rows, what = rows_of(value, rank, 2), "a parameter after the last step"
            mine = t.tensor(shards.get(name), what, shape=rows.shape, dtype=rows.dtype)
            off.append((mine - rows).abs().flatten())
        message = (
            "After a step in mixed precision the fp32 parameters differ from those of one process: an "
            "update of {lr} is lost where a parameter is rounded to bf16. The optimiser updates the fp32 "
            "shards only"
        )
        t.that(bool(torch.cat(off).mean() < 0.1 * lr), message, lr=lr)

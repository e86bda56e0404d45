"""The visible checks of the whole: hooks at the right moment, the full state, and training against one process.

Traffic is counted outside the student's process; bytes are exact, padding included. Memory is read from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dlo_lib.comm.calls import Call
from dlo_lib.grading.checks.contract import Kind, Nudge, check
from dlo_lib.labkit.compare import wrong_if
from dlo_lib.labkit.order import comes_before, first_difference
from dlo_lib.labkit.traffic import passes_only, sends_one_of, uses_what_arrives
from dlo_lib.models.llama import Block

from .gathering import GRADIENTS, MIB, ROOM, ROOM_OF_LIBRARY, ROWS, gathers_rows, reduces_gradients
from .scenarios import backward_of_llama, large_state, layers_in_order, prepared, trained, whole_state
from .twins import (
    expected_units,
    from_ranks,
    large_layers,
    layered,
    llama,
    packed_bytes,
    rank_gradients,
    rounded_losses,
    rounded_step,
    rows_of,
    whole_gradients,
    whole_training,
)

TINY = {"vocab_size": 11, "hidden": 6, "intermediate": 10, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}

# -- the order of a step

# Units have messages of different sizes. Each block makes a small all-reduce while it computes, in forward and in
# backward: so the order of calls shows which unit was gathered before which block computed.
WORDS = {Kind.ALL_GATHER: "gather", Kind.REDUCE_SCATTER: "reduce"}
SMALL = 4  # bytes of a computing block's all-reduce


def described(calls: Sequence[Call], sizes: Sequence[int]) -> list[str]:
    """The calls in words; ``sizes``: bytes of the packed root and blocks."""
    names = {size: _unit(number) for number, size in enumerate(sizes)}
    found, computed, blocks = [], 0, len(sizes) - 1
    for call in calls:
        if call.kind is Kind.ALL_REDUCE and call.payload_bytes == SMALL:
            found.append(f"compute {_unit(computed + 1 if computed < blocks else 2 * blocks - computed)}")
            computed += 1
        else:
            word = WORDS.get(call.kind, call.kind.value)
            found.append(f"{word} {names.get(call.payload_bytes, f'{call.payload_bytes} bytes')}")
    return found


def expected_order(blocks: int) -> list[str]:
    """A step in which the root is always whole, and one block at a time."""
    forward = [f"{word} {_unit(number)}" for number in range(1, blocks + 1) for word in ("gather", "compute")]
    backward = [f"{word} {_unit(number)}" for number in range(blocks, 0, -1) for word in ("gather", "compute", "reduce")]
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
    if any("bytes" in step for step in got):
        return f"a message is not a packed unit: '{next(step for step in got if 'bytes' in step)}'. {where}"
    if comes_before(got, f"gather {units[-1]}", f"compute {units[1]}"):
        return f"gathers everything at once: the last block is gathered before the first computes. {where}"
    kept = [unit for unit in units[1:] if got.count(f"gather {unit}") == 1]
    if kept:
        return f"never freed: {kept[0]} was gathered once, so it stayed whole from forward to backward. {where}"
    if missing := [step for step in want if step not in got]:
        return f"'{missing[0]}' is missing. {where}"
    if found.startswith("gather") and right.startswith("reduce"):
        cause = "watch_input should register its hook on arg.view_as(arg), and return that tensor"
        return f"three units are whole: the next block is gathered before the previous one is reduced and freed. {cause}. {where}"
    return f"the order is wrong. {where}"


def _unit(number: int) -> str:
    return f"block {number}" if number else "root"


# -- models


def state_of(t, sizes: dict, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Weights of a small Llama."""
    return {
        name: t.normal(*value.shape, dtype=dtype) / 3
        for name, value in llama(sizes, device="meta").state_dict().items()
        if not tied_copy(sizes, name)
    }


def tied_copy(sizes: dict, name: str) -> bool:
    """Whether this is the second name of tied embeddings."""
    return bool(sizes.get("tied_embeddings")) and name == "lm_head.weight"


def whole_state_of(t, sizes: dict, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same under all names."""
    state = state_of(t, sizes, dtype)
    return {**state, "lm_head.weight": state["embed_tokens.weight"]} if sizes.get("tied_embeddings") else state


def batch_of(t, sizes: dict, rows: int, seq: int, ignored: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets, some of which do not count."""
    tokens, targets = (t.integers(0, sizes["vocab_size"] - 1, rows, seq) for _ in range(2))
    targets.view(-1)[:ignored] = -100
    return tokens, targets


def same_llama(student, t, world: int, frozen: list[str], batches: int = 1) -> None:
    """Losses and gradients of all ranks are those of one process."""
    sizes = {**TINY, "tied_embeddings": True}
    state = whole_state_of(t, sizes)
    own = [[batch_of(t, sizes, t.integer(1, 3), 4) for _ in range(batches)] for _ in range(world)]
    case = [{"sizes": sizes, "state": state, "frozen": frozen, "batches": mine} for mine in own]
    run = student.ranks(backward_of_llama, case)
    losses, grads = whole_gradients(sizes, state, frozen, [batch for mine in own for batch in mine])
    for rank, (got, shards) in enumerate(run.results):
        want = losses[rank * batches : (rank + 1) * batches]
        for mine, right in zip(t.items(got, batches, "the losses"), want):
            t.close(mine, right, "the loss of rank {rank} of {world}", rank=rank, world=world, rtol=1e-9, atol=1e-10)
        for name, right in grads.items():
            what = "the gradient of {name} on rank {rank} of {world}"
            message = what + " is missing after torch.autograd.backward(loss): the function that queue_end queues must reduce what is left"
            t.that(name in shards and shards[name] is not None, message, name=name, rank=rank, world=world)
            rows = rows_of(batches * right, rank, world)
            t.close(shards[name], rows, what, name=name, rank=rank, world=world, rtol=1e-9, atol=1e-10)
        t.that(all(shards.get(name) is None for name in frozen), "a frozen parameter has a gradient on rank {rank}", rank=rank)
    passes_only(
        t, run, [Kind.ALL_GATHER, Kind.REDUCE_SCATTER], "rank {rank} used {kinds} too: a step needs gathers and reduce-scatters only"
    )
    units = [names for _, names in expected_units(sizes, [], Block)]
    gathers_rows(t, run, [[state[same[0]] for same in names] for names in units])
    sent = [[trained_units(units, whole_gradients(sizes, state, frozen, [batch])[1]) for batch in mine] for mine in own]
    reduces_gradients(t, run, [[unit for of_batch in mine for unit in of_batch] for mine in sent])


def trained_units(units: list[list[list[str]]], grads: dict[str, Tensor]) -> list[list[Tensor]]:
    """The gradients of the trained parameters of each unit that has some."""
    of_units = [[grads[same[0]] for same in names if same[0] in grads] for names in units]
    return [unit for unit in of_units if unit]


def layers_case(t, world: int, blocks: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The matrices of root and layers, all of different sizes, and each rank's input."""
    widths = [3, *(4 + 2 * i + t.integer(0, 1) for i in range(blocks + 1))]
    tensors = [t.normal(a, b, dtype=dtype) / 2 for a, b in pairwise(widths)]
    return tensors[0], tensors[1:], [t.normal(2, 3, dtype=dtype) for _ in range(world)]


ALL = ["forward", "backward", "end"]


def order_run(student, t, world: int, blocks: int, parts: list[str] | None, times: int = 1):
    """``times`` forwards and backwards of layers on ranks, compared with one process; the run, and the bytes of the packed root and blocks."""
    first, weights, xs = layers_case(t, world, blocks)
    run = student.ranks(layers_in_order, [{**layers_args(first, weights, parts, times=times), "x": x} for x in xs])
    outputs, grads = layered(first, weights, xs)
    for rank, (got, shards, *_) in enumerate(run.results):
        t.close(t.items(got, times, "the outputs")[-1], outputs[rank], "the output of rank {rank}", rank=rank, rtol=1e-9)
        for i, (mine, right) in enumerate(zip(t.items(shards, blocks + 1, "the gradients"), grads)):
            if parts != ["forward"]:
                what = "the gradient of {unit} on rank {rank} of {world}, after {times} steps"
                values = {"unit": _unit(i), "rank": rank, "world": world, "times": times}
                t.that(mine is not None, what + " is missing", **values)
                t.close(mine, rows_of(times * right, rank, world), what, **values, rtol=1e-9, atol=1e-12)
    gathers_rows(t, run, [[tensor] for tensor in (first, *weights)])
    reduces_gradients(t, run, [[[grad] for grad in layered(first, weights, [x])[1]] for x in xs])
    return run, [packed_bytes([tensor.shape], world, 8) for tensor in (first, *weights)]


def frees_units(t, run, parts: list[str], times: int) -> None:
    """In forward and in backward only the root and the block that computes have memory, at the end no unit; a storage stays the same."""
    for rank, (_, grads, looked, _, moved) in enumerate(run.results):
        blocks = len(grads) - 1
        forward = [[0, number] for number in range(1, blocks + 1)]
        *during, last = t.items(looked, times * blocks * (1 if parts == ["forward"] else 2) + 1, "the units with memory")
        want = forward if parts == ["forward"] else [*forward, *reversed(forward)]
        for at, held in enumerate(during):
            values = {"rank": rank, "unit": _unit(want[at % len(want)][1]), "more": [_unit(unit) for unit in held]}
            values["when"] = "forward" if at % len(want) < blocks else "backward"
            message = (
                "never freed: in the {when} of {unit} the units with memory on rank {rank} are {more}, not the root and this block only. "
                "Free a unit with reshard(unit)"
            )
            t.that(held == want[at % len(want)], message, **values)
        left = [unit for unit in last if unit or parts != ["forward"]]
        message = "never freed: at the end {left} of rank {rank} still have memory. Free a unit with reshard(unit)"
        t.that(not left, message, left=[_unit(unit) for unit in left], rank=rank)
        t.that(not moved, "a whole parameter has another storage than at the beginning: autograd may have saved its own one")


def layers_args(first: Tensor, weights: list[Tensor], parts: list[str] | None = None, **others) -> dict:
    """The arguments of ``layers_in_order`` except x."""
    return {
        "first": first,
        "weights": weights,
        "compute": None,
        "reduce": None,
        "times": 1,
        "factor": None,
        "parts": parts,
        "drawn": None,
        **others,
    }


# -- forward


@check("forward", points=2, seconds=30)
def check_forward_order(student, t):
    "Each unit is gathered before it computes, and the root stays whole for backward"
    world, blocks = 2, t.integer(3, 4)
    run, sizes = order_run(student, t, world, blocks, ["forward"])
    want = expected_order(blocks)[: 1 + 2 * blocks]
    for rank in range(world):
        got = described(run.calls(rank), sizes)
        message = "the root is freed after a forward that a backward follows, and is gathered again at once: free it only without backward"
        t.that(got != [*want, "gather root"], message)
        t.that(got == want, explain(got, want, blocks))
    frees_units(t, run, ["forward"], 1)


@check("forward", points=1, seconds=30)
def check_freed_after_forward(student, t):
    "After forward only the root is whole: the memory of each process"
    run, row, whole = rest_run(student, t, 3, ["forward"])
    for rank in range(run.world):
        late = (
            "freed too late: in the forward of block 3 rank {rank} holds {held:.0f} MiB, but its rows and two whole units, the root and this "
            "block, have {want:.0f}: after_forward of the blocks before must free their memory at once"
        )
        message = (
            "never freed: after forward rank {rank} holds {held:.0f} MiB, but its rows and the whole root have {want:.0f}: after_forward "
            "must free each block"
        )
        held, most = run.memory(rank, "after forward"), row + whole
        t.that(held < most + ROOM, message, rank=rank, held=held / MIB, want=most / MIB)
        held, most = run.memory(rank, "in forward"), row + 2 * whole
        t.that(held < most + ROOM, late, rank=rank, held=held / MIB, want=most / MIB)


@check("forward", points=1, seconds=40)
def check_inference(student, t):
    "Without gradients every unit is freed, and the next forward sees new weights"
    first, weights, xs = layers_case(t, 2, 2)
    factor = t.uniform(1.2, 1.6)
    fixed = layers_args(first, weights, ["forward"], times=2, factor=factor)
    results = student.ranks(layers_in_order, [{**fixed, "x": x} for x in xs]).results
    for times in (1, 2):
        want, _ = layered(first * factor**times, [weight * factor**times for weight in weights], xs)
        stale, _ = layered(first * factor, [weight * factor**times for weight in weights], xs)
        for right, wrong, (got, *_) in zip(want, stale, results):
            mine = t.tensor(t.items(got, 2, "the outputs")[times - 1], "the output")
            message = (
                "The second forward used old weights of the root: without gradients there is no backward that frees it, so "
                "after_forward must free it."
            )
            wrong_if(t, mine, right, {message: wrong})
            t.close(mine, right, "the output of forward {times} without gradients, after weights have changed", times=times, rtol=1e-9)


@check("forward", points=1, seconds=20)
def check_cast(student, t):
    "Floating-point inputs get the dtype in which the unit computes"
    x, tokens = t.normal(2, 3), t.integers(0, 9, 4)
    for got in student.ranks(prepared, [{"weight": t.normal(4, 3), "x": x, "tokens": tokens}] * 2).results:
        args = t.items(got, 4, "what before_forward returns, a tuple,")
        message = "before_forward has cast the tokens, which are integers: cast floating-point tensors only"
        t.that(type(args[1]) is not Tensor or args[1].dtype == tokens.dtype, message)
        t.close(args[0], x.bfloat16(), "the input in compute_dtype (bf16)", atol=0, rtol=0)
        t.equal(t.tensor(args[1], "the tokens").tolist(), tokens.tolist(), "the tokens")
        t.that(args[2] is None, "an argument that is no tensor should be unchanged")
        t.close(args[3], (2 * x).bfloat16(), "a later input in compute_dtype (bf16)", atol=0, rtol=0)


# -- backward


@check("backward", points=3, seconds=40)
def check_order(student, t):
    "Each unit is gathered, freed and reduced at the right time"
    world, blocks = 2, t.integer(3, 4)
    run, sizes = order_run(student, t, world, blocks, ["forward", "backward"])
    want = expected_order(blocks)
    for rank in range(world):
        got = described(run.calls(rank), sizes)
        t.that(got == want, explain(got, want, blocks))
        for number, begun in zip(range(blocks, 0, -1), t.items(run.results[rank][3], blocks, "the lists of pending")):
            message = (
                "in the backward of block {number}, pending has {begun}, not the root and this block: the hook of watch_output appends each "
                "unit, and that of watch_input removes it"
            )
            t.that(begun == [0, number], message, number=number, begun=[_unit(unit) for unit in begun])
    frees_units(t, run, ["forward", "backward"], 1)
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1), call=t.integer(1 + blocks, 2 * blocks))


@check("backward", points=2, seconds=40)
def check_gradients(student, t):
    "The shards have the gradients of one process, also after many steps"
    for world, times in ((1, 1), (2, t.integer(5, 12)), (3, 1)):
        run, sizes = order_run(student, t, world, t.integer(2, 3), ["forward", "backward"], times)
    blocks = len(sizes) - 1
    rank = t.choice((0, 2))  # what comes from rank 2, next to rank 1, may be padding only
    uses_what_arrives(t, run, Kind.ALL_GATHER, rank, call=t.integer(1 + blocks, 2 * blocks))


@check("backward", points=2, seconds=40)
def check_blocks_at_rest(student, t):
    "After backward no block is whole: the memory of each process"
    at_rest(student, t, 3, ["forward", "backward"], "the hook of watch_input must free each block")


def rest_run(student, t, count: int, parts: list[str] | None):
    """The run, and the bytes of a rank's rows and of a whole unit. In this run a number of the root is changed on its way to a rank, which shows
    in the loss and the gradients of this rank: so it computes with what it receives."""
    seed, width, rank, by = t.integer(0, 999), 1024 if count > 1 else 1792, t.integer(0, 1), 30.0
    place, losses, sums, first, sent = large_layers(seed, width, count + 1, rank, by)
    case = {**layers_args(None, [], parts, drawn=[seed, width, count]), "x": None}
    run = student.ranks(layers_in_order, [case] * 2, nudge=Nudge(Kind.ALL_GATHER, rank, element=place, by=by))
    for right, (got, *_) in zip(losses, run.results):
        what = "the loss, where a number of the root is changed on its way to rank {rank}"
        t.close(t.items(got, 1, "the losses")[0], torch.tensor(right), what, rank=rank, rtol=1e-3)
    if parts != ["forward"]:
        for i, want in enumerate(sums):
            found = [t.items(shards, count + 1, "the gradients")[i] for _, shards, *_ in run.results]
            t.that(all(own is not None for own in found), "the gradient of {unit} is missing", unit=_unit(i))
            got = sum(float(t.tensor(own, "the sum of gradient {i}", i=i, shape=())) for own in found)
            t.close(got, want, "the sum of gradient {i}", i=i, rtol=2e-2, atol=1e-4)
    sends_one_of(t, run, Kind.ALL_GATHER, list(zip(*first)), ROWS)
    sends_one_of(t, run, Kind.REDUCE_SCATTER, sent, GRADIENTS, rtol=1e-2, divided=2)
    whole = 4 * width**2
    return run, (count + 1) * whole / 2, whole


def at_rest(student, t, count: int, parts: list[str] | None, cure: str) -> None:
    """After backward a rank holds its rows and their gradients."""
    run, row, whole = rest_run(student, t, count, parts)
    for rank in range(run.world):
        most = row + 2 * whole + (count - 1) * whole / 2  # the root, block 1, and the shards' gradients of the blocks after it
        late = (
            "freed too late: in the backward of block 1 rank {rank} holds {held:.0f} MiB, but its rows, two whole units and the gradients of "
            "its shards have {want:.0f}: the hook of watch_input must free the memory of each block at once"
        )
        held = run.memory(rank, "at the end")
        message = (
            "never freed: after backward rank {rank} holds {held:.0f} MiB, but rows and their gradients have twice {row:.0f} MiB: {cure}"
        )
        room = ROOM_OF_LIBRARY if parts is None else ROOM
        t.that(held < 2 * row + room, message, rank=rank, held=held / MIB, row=row / MIB, cure=cure)
        held = run.memory(rank, "in backward")
        t.that(parts is None or held < most + ROOM, late, rank=rank, held=held / MIB, want=most / MIB)


# -- the end of backward


@check("end", points=3, seconds=60)
def check_same_gradients(student, t):
    "A Llama with tied and frozen weights has the twin's loss and gradients"
    for world in (1, 2, 3):
        same_llama(student, t, world, [f"layers.{t.integer(0, 1)}.mlp.up_proj.weight"])


@check("end", points=1, seconds=40)
def check_frozen_first(student, t):
    "A frozen embedding and a frozen block before trained ones, in two steps"
    frozen = [name for name in llama({**TINY, "num_layers": 2}, device="meta").state_dict() if name.startswith(("embed", "lm_head"))]
    same_llama(student, t, 2, frozen[:1] if t.integer(0, 1) else [*frozen[:1], "layers.0.mlp.up_proj.weight"], batches=2)


@check("end", points=1, seconds=40)
def check_mixed_precision(student, t):
    "Computed in bf16, reduced in fp32"
    first, weights, xs = layers_case(t, 2, 2, torch.float32)
    run = student.ranks(layers_in_order, [{**layers_args(first, weights, compute="bfloat16", reduce="float32"), "x": x} for x in xs])
    outputs, grads = layered(first, weights, xs, torch.bfloat16)
    for rank, (got, shards, *_) in enumerate(run.results):
        t.close(t.items(got, 1, "the outputs")[0], outputs[rank], "the output in bf16 on rank {rank}", rank=rank, rtol=3e-2, atol=3e-2)
        for i, (mine, right) in enumerate(zip(t.items(shards, 3, "the gradients"), grads)):
            what = "the gradient of {unit} on rank {rank}, in the dtype of its shard"
            t.close(mine, rows_of(right, rank, 2), what, unit=_unit(i), rank=rank, rtol=3e-2, atol=3e-3)
    sizes = [packed_bytes([tensor.shape], 2, 2) for tensor in (first, *weights)]
    good = all(call.payload_bytes in sizes for rank in range(2) for call in run.calls(rank, Kind.ALL_GATHER))
    t.that(good, "With bf16 as compute_dtype, gathers should have half the bytes of fp32.")


@check("end", points=2, seconds=30)
def check_step_bytes(student, t):
    "Each step sends the bytes of the formula, and leaves no unit whole"
    world, blocks = 2, t.integer(2, 3)
    many = t.integer(5, 12)
    for parts, times in ((ALL, many), (None, 2)):  # by hooks that call the functions of the exercises, and by shard_model
        run, (root, *others) = order_run(student, t, world, blocks, parts, times)
        for rank in range(world):
            got, sent = run.bytes(rank, Kind.ALL_GATHER), run.bytes(rank, Kind.REDUCE_SCATTER)
            message = (
                "in {times} steps rank {rank} gathered {got} bytes; the root once a step, and each block for forward and for backward, make "
                "{want}"
            )
            want = times * (root + 2 * sum(others))
            t.that(got == want, message, times=times, rank=rank, got=got, want=want)
            message = (
                "In {times} steps rank {rank} reduce-scattered {sent} bytes; each unit once a step makes {want}. Remove each unit that is "
                "reduced from pending, and no other one"
            )
            t.that(sent == times * (root + sum(others)), message, times=times, rank=rank, sent=sent, want=times * (root + sum(others)))
        if parts == ALL:
            frees_units(t, run, ALL, times)
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1))


@check("end", points=2, seconds=40)
def check_at_rest(student, t):
    "At rest a rank holds 1/N of parameters and gradients: the memory of each process"
    at_rest(student, t, 1, None, "the root is freed at the end of backward")


# -- the state dict


def state_run(student, t, world: int, compute: str | None = None, tied: bool = False, buffer: Tensor | None = None, frozen: str = ""):
    """``full_state`` is the state of the shards, which change after sharding; the run, and the sizes.
    With the name of a frozen parameter: in the second call."""
    sizes = {**TINY, "tied_embeddings": tied}
    state, first = whole_state_of(t, sizes, torch.float32), t.integer(0, 2)
    scales = [2.0 ** (1 + (first + rank) % 3) for rank in range(world)]  # no rank knows the rows of the others
    inputs = {"sizes": sizes, "state": state, "frozen": [frozen] if frozen else [], "compute": compute, "buffer": buffer}
    run = student.ranks(whole_state, [{**inputs, "scale": scale} for scale in scales])
    want = {name: from_ranks([[scale * weight] for scale in scales])[0] for name, weight in state.items()}
    want |= {} if buffer is None else {"layers.0.seen": buffer}
    for rank, (got, _) in enumerate(run.results):
        t.that(type(got) is dict, "full_state should return a dict")
        t.that(not frozen or frozen in got, "the state of rank {rank} lacks {name}: frozen parameters belong to it", rank=rank, name=frozen)
        for name, right in want.items():
            t.that(name in got, "the state of rank {rank} of {world} lacks {name}", rank=rank, world=world, name=name)
            before = "{name} on rank {rank} of {world} is that before the shards changed: gather the rows when full_state is called"
            if name in state:
                wrong_if(t, got[name], right, {before: state[name]}, name=name, rank=rank, world=world)
            t.close(got[name], right, "{name} in the state of rank {rank} of {world}", name=name, rank=rank, world=world, atol=0, rtol=0)
        message = "the state has layers.0.scratch, a buffer registered with persistent=False: model.state_dict() does not have it"
        t.that("layers.0.scratch" not in got, message)
        t.that(set(got) <= set(want), "the state has names that the model lacks: {names}", names=sorted(set(map(str, got)) - set(want))[:3])
    names = [held for _, held in expected_units(sizes, [], Block)]
    units = [[values[same[0]] for same in held] for values in ([want, state] if frozen else [want]) for held in names]
    at_once = [[values[same[0]] for held in names for same in held] for values in (want, state)]  # another check is for this
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
    state_run(student, t, 2, tied=True, buffer=t.normal(3), frozen=f"layers.{t.integer(0, 1)}.self_attn.o_proj.weight")


@check("state", points=1, seconds=30)
def check_unit_by_unit(student, t):
    "One unit at a time"
    run, sizes = state_run(student, t, 2)
    model = llama(sizes, device="meta")
    blocks = [[parameter.shape for parameter in block.parameters()] for block in model.layers]
    root = [parameter.shape for name, parameter in model.named_parameters() if not name.startswith("layers.")]
    most = max(packed_bytes(unit, 2, 4) for unit in [root, *blocks])
    for rank in range(2):
        message = "full_state gathers everything at once: one gather has {got} bytes, the largest unit {most}. Gather one unit at a time"
        t.that(run.max_unsharded(rank) <= most, message, got=run.max_unsharded(rank), most=most)
        whole = t.items(run.results[rank], 2, "the state and the whole units")[1]
        message = "full_state leaves units whole: {units}. It needs the packed rows of one unit at a time, and no whole parameters"
        t.that(not whole, message, units=[_unit(number) for number in whole])
    seed, width, count, units_at_once = (
        t.integer(0, 999),
        724,
        t.integer(8, 12),
        4,
    )  # the packed one, a copy, and what sends and receives it
    (got,) = student.ranks(large_state, [{"seed": seed, "width": width, "count": count, "units_at_once": units_at_once}]).results
    message = (
        "full_state holds the packed rows of several units: memory for its result and {some} of {count} units is not enough. Clone the weights "
        "of a unit, and keep nothing else of it"
    )
    t.that(got != "memory", message, some=units_at_once, count=count)
    random = torch.Generator().manual_seed(seed)
    t.that(type(got) is dict, "full_state should return a dict")
    for number in range(count):
        want = torch.randn(width, width, generator=random).sum()
        t.close(got.get(str(number)), want, "the sum of weight {number}", number=number, rtol=1e-3, atol=1e-1)


# -- training


def train_run(student, t, own: list[list[list[tuple[Tensor, Tensor]]]], frozen: list[str], tied: bool, kind: str = "AdamW"):
    """Losses and parameters are those of one process, for micro-batches by rank, step and number; the run, and the shapes by name."""
    world, steps = len(own), len(own[0])
    sizes = {**TINY, "tied_embeddings": tied}
    state, lr = whole_state_of(t, sizes), 0.01
    fixed = {"sizes": sizes, "state": state, "frozen": frozen, "lr": lr, "dtype": "float64", "compute": None, "reduce": None}
    fixed["optimizer"] = kind
    run = student.ranks(trained, [{**fixed, "steps": mine} for mine in own])
    at_once = [[batch for mine in own for batch in mine[step]] for step in range(steps)]
    losses, values = whole_training(sizes, state, frozen, at_once, lr, kind)
    for rank, (got, shards, _) in enumerate(run.results):
        for step, (mine, right) in enumerate(zip(t.items(got, steps, "the losses"), losses)):
            what = "the loss of step {step} on rank {rank} of {world}"
            t.close(mine, right, what, step=step, rank=rank, world=world, rtol=1e-8, atol=1e-9)
        for name, right in values.items():
            rows, what = rows_of(right, rank, world), "{name} on rank {rank} of {world} after the last step of the given optimizer, {kind}"
            t.close(shards.get(name), rows, what, name=name, rank=rank, world=world, kind=kind, rtol=1e-7, atol=1e-8)
    if len(own[0][0]) == 1:  # micro-batches of the first step
        units = [names for _, names in expected_units(sizes, [], Block)]
        gathers_rows(t, run, [[state[same[0]] for same in names] for names in units], first=len(units))
        count = sum(int((targets != -100).sum()) for mine in own for _, targets in mine[0])
        sent = [trained_units(units, rank_gradients(sizes, state, frozen, mine[0][0], world / count)) for mine in own]
        reduces_gradients(t, run, sent, first=len(sent[0]))
    loss_and_count_only(t, run, steps * (1 + len(own[0][0])))
    return run, {name: value.shape for name, value in values.items()}


def loss_and_count_only(t, run, times: int) -> None:
    """Besides gathers and reduce-scatters, a rank passes at most two numbers ``times`` times; the batches of the other ranks have more."""
    message = "rank {rank} passes {got} bytes besides gathers and reduce-scatters: a step needs the loss and the count only, two numbers"
    for rank in range(run.world):
        got = sum(call.payload_bytes for call in run.calls(rank) if call.kind not in WORDS)
        t.that(got <= 16 * times, message, rank=rank, got=got)


@check("train", points=4, seconds=60)
def check_trains(student, t):
    "Several steps with unequal batches, tied and frozen weights equal those of one process, and leave no gradient"
    for world, steps in ((2, t.integer(4, 8)), (3, 2)):
        frozen = [f"layers.{t.integer(0, 1)}.self_attn.o_proj.weight"]
        own = [[[batch_of(t, TINY, 1 + rank, 32, t.integer(1, 9))] for _ in range(steps)] for rank in range(world)]
        run, _ = train_run(student, t, own, frozen, tied=True)
        for rank, (_, _, left) in enumerate(run.results):
            t.that(not left, "after a step rank {rank} still has a gradient: set every grad to None after optimizer.step()", rank=rank)


@check("train", points=2, seconds=40)
def check_training_traffic(student, t):
    "The bytes of a step are those of the formula"
    world, frozen = 2, f"layers.{t.integer(0, 1)}.mlp.up_proj.weight"
    run, shapes = train_run(student, t, [[[batch_of(t, TINY, 2, 32)]] for _ in range(world)], [frozen], tied=False)
    blocks = packed_bytes([shape for name, shape in shapes.items() if name.startswith("layers.")], world, 8)
    gathers = packed_bytes(list(shapes.values()), world, 8) + blocks
    reduces = packed_bytes([shape for name, shape in shapes.items() if name != frozen], world, 8)
    for rank in range(world):
        got, sent = run.bytes(rank, Kind.ALL_GATHER), run.bytes(rank, Kind.REDUCE_SCATTER)
        message = "gathered twice: rank {rank} gathered {got} bytes; the root once, and blocks for forward and backward, make {want}"
        t.that(got <= gathers, message, rank=rank, got=got, want=gathers)
        t.that(got == gathers, "rank {rank} gathered {got} bytes instead of {want}", rank=rank, got=got, want=gathers)
        t.that(sent == reduces, "rank {rank} reduce-scattered {sent} bytes instead of {want}", rank=rank, sent=sent, want=reduces)
        rest = run.bytes(rank) - got - sent
        message = (
            "rank {rank} passed {rest} bytes besides gathers and reduce-scatters, but loss and count are two numbers: "
            "is a gradient communicated un-sharded?"
        )
        t.that(rest <= 16, message, rank=rank, rest=rest)
    uses_what_arrives(t, run, Kind.REDUCE_SCATTER)


@check("train", points=2, seconds=60)
def check_micro_batches(student, t):
    "Micro-batches with unequal numbers of targets"
    own = [[[batch_of(t, TINY, 2, 32, 45), batch_of(t, TINY, 2, 32, 0)]] for _ in range(2)]
    train_run(student, t, own, [], tied=False, kind="SGD")


@check("train", points=2, seconds=40)
def check_masters(student, t):
    "With mixed precision the loss is computed in fp32, and small updates are kept"
    state, lr = whole_state_of(t, TINY, torch.float32), 1e-4

    def draw() -> list[tuple[Tensor, Tensor]]:
        return [batch_of(t, TINY, 2, 32, t.integer(0, 9)) for _ in range(2)]

    def tells(batches: list[tuple[Tensor, Tensor]]) -> bool:
        loss, rounded = rounded_losses(TINY, state, batches)
        return all(abs(wrong - loss) > 8e-4 * loss for wrong in rounded)

    batches = t.draw_until(draw, tells)
    fixed = {"sizes": TINY, "state": state, "frozen": [], "lr": lr, "dtype": "float32", "compute": "bfloat16", "reduce": "float32"}
    run = student.ranks(trained, [{**fixed, "steps": [[batch]]} for batch in batches])
    loss_and_count_only(t, run, 2)
    want, (loss, _) = rounded_step(TINY, state, batches, lr), rounded_losses(TINY, state, batches)
    for rank, (losses, shards, _) in enumerate(run.results):
        got = t.number(t.items(losses, 1, "the losses")[0], "the loss")
        message = "the loss of rank {rank} is {got}, not {loss}: in bf16 it is rounded. Compute it from logits.float()"
        t.that(abs(got - loss) <= 3e-4 * loss, message, rank=rank, got=got, loss=loss)
        off = []
        for name, value in want.items():
            rows = rows_of(value, rank, 2)
            mine = t.tensor(shards.get(name), "a parameter after the last step", shape=rows.shape, dtype=rows.dtype)
            off.append((mine - rows).abs().flatten())
        t.that(
            bool(torch.cat(off).mean() < 0.1 * lr),
            "After a step in mixed precision the fp32 parameters differ from those of one process: an update of {lr} is lost where a "
            "parameter is rounded to bf16. The optimiser updates the fp32 shards only",
            lr=lr,
        )

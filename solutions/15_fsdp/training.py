"""The visible checks of the whole: hooks at the right moment, the full state, and training against one process.

Traffic is what passed the switch; bytes are exact, padding counted. Memory is read from outside.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, check

from .gathering import MIB
from .orders import described, expected_order, explain
from .scenarios import backward_of_llama, large_at_rest, layers_in_order, trained, whole_state
from .twins import large_layers, layered, llama, packed_bytes, rows_of, whole_gradients, whole_training

TINY = {"vocab_size": 11, "hidden": 6, "intermediate": 10, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}

# -- 9 · hooks


def state_of(t, sizes: dict, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Weights of a small Llama, large enough to matter."""
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
            t.that(name in shards and shards[name] is not None, what + " is missing", name=name, rank=rank, world=world)
            rows = rows_of(batches * right, rank, world)
            t.close(shards[name], rows, what, name=name, rank=rank, world=world, rtol=1e-9, atol=1e-10)
        t.that(all(shards.get(name) is None for name in frozen), "a frozen parameter has a gradient on rank {rank}", rank=rank)


@check("hooks", points=4, seconds=60)
def check_same_gradients(student, t):
    "A Llama with tied and frozen weights has the twin's loss and gradients"
    for world in (1, 2, 3):
        same_llama(student, t, world, [f"layers.{t.integer(0, 1)}.mlp.up_proj.weight"])


def layers_case(t, world: int, blocks: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The root's matrix, those of layers, all of other sizes, and each rank's input."""
    widths = [3, *(4 + 2 * i + t.integer(0, 1) for i in range(blocks + 1))]
    tensors = [t.normal(a, b, dtype=dtype) / 2 for a, b in pairwise(widths)]
    return tensors[0], tensors[1:], [t.normal(2, 3, dtype=dtype) for _ in range(world)]


def order_run(student, t, world: int, blocks: int):
    """A step of layers on ranks, compared with one process; the run, and the tensors of root and blocks."""
    first, weights, xs = layers_case(t, world, blocks)
    fixed = {"first": first, "weights": weights, "compute": None, "reduce": None, "times": 1, "factor": None}
    run = student.ranks(layers_in_order, [{**fixed, "x": x} for x in xs])
    outputs, grads = layered(first, weights, xs)
    for rank, (got, shards) in enumerate(run.results):
        t.close(t.items(got, 1, "the outputs")[0], outputs[rank], "the output of rank {rank}", rank=rank, rtol=1e-9)
        for i, (mine, right) in enumerate(zip(t.items(shards, blocks + 1, "the gradients"), grads)):
            t.close(mine, rows_of(right, rank, world), "gradient {i} on rank {rank}", i=i, rank=rank, rtol=1e-9, atol=1e-12)
    return run, [first, *weights]


@check("hooks", points=4, seconds=40)
def check_order(student, t):
    "Each unit is gathered, freed and reduced at its time"
    world, blocks = 2, t.integer(3, 4)
    run, tensors = order_run(student, t, world, blocks)
    sizes = [packed_bytes([tensor.shape], world, 8) for tensor in tensors]
    want = expected_order(blocks)
    for rank in range(world):
        got = described(run.calls(rank), sizes)
        t.that(got == want, explain(got, want, blocks), rank=rank)


@check("hooks", points=3, seconds=60)
def check_at_rest(student, t):
    "At rest a rank holds 1/N of parameters and gradients"
    seed, width, count, world = t.integer(0, 999), 1448, 2, 2
    run = student.ranks(large_at_rest, [{"seed": seed, "width": width, "count": count}] * world)
    loss, sums = large_layers(seed, width, count)
    for rank, (got, _) in enumerate(run.results):
        t.close(got, loss, "the loss of rank {rank}", rank=rank, rtol=1e-3)
    for i, want in enumerate(sums):
        t.close(sum(shards[i] for _, shards in run.results), want, "the sum of gradient {i}", i=i, rtol=2e-2, atol=1e-4)
    row = 4 * count * width**2 / world
    for rank in range(world):
        forward, backward = (run.memory(rank, f"after {phase}") for phase in ("forward", "backward"))
        values = {"rank": rank, "forward": forward / MIB, "backward": backward / MIB, "row": row / MIB}
        kept = 0 < len(run.calls(rank, Kind.ALL_GATHER)) < 2 * count + 1  # blocks were not gathered again, so they were whole still
        t.that(
            kept or forward < world * row + 2 * MIB or backward < 1.5 * world * row,
            "not sharded: rank {rank} holds {forward:.0f} MiB after forward and {backward:.0f} after backward; its rows are {row:.0f}",
            **values,
        )
        t.that(forward < row + 6 * MIB, "never freed: after forward rank {rank} holds {forward:.0f} MiB, its rows are {row:.0f}", **values)
        message = "never freed: after backward rank {rank} holds {backward:.0f} MiB; rows and their gradients are twice {row:.0f}"
        t.that(backward < 2 * row + 6 * MIB, message, **values)


# -- 10 · state


def state_run(student, t, world: int, compute: str | None = None, tied: bool = False, buffer: Tensor | None = None, only: str = ""):
    """``full_state`` is the state that was sharded; the run, and the sizes. ``only``: look at this name alone."""
    sizes = {**TINY, "tied_embeddings": tied}
    state = whole_state_of(t, sizes, torch.float32)
    run = student.ranks(whole_state, [{"sizes": sizes, "state": state, "compute": compute, "buffer": buffer}] * world)
    want = {**state, **({} if buffer is None else {"layers.0.seen": buffer})}
    for rank, got in enumerate(run.results):
        t.that(type(got) is dict, "full_state should give a dict")
        for name, right in want.items():
            if name == only or not only:
                t.that(name in got, "the state of rank {rank} of {world} lacks {name}", rank=rank, world=world, name=name)
                t.close(
                    got[name], right, "{name} in the state of rank {rank} of {world}", name=name, rank=rank, world=world, atol=0, rtol=0
                )
        t.that(
            set(got) <= set(want), "the state has names that the model has not: {names}", names=sorted(set(map(str, got)) - set(want))[:3]
        )
    return run, sizes


@check("state", points=2, seconds=40)
def check_state(student, t):
    "Every rank gets the whole state"
    for world in (1, 2, 3):
        state_run(student, t, world)


@check("state", points=1, seconds=30)
def check_state_is_exact(student, t):
    "With mixed precision the state is that of the shards, not rounded"
    state_run(student, t, 2, compute="bfloat16")


# -- 11 · training


def train_run(student, t, own: list[list[list[tuple[Tensor, Tensor]]]], frozen: list[str], tied: bool):
    """Losses and parameters are those of one process, for micro-batches by rank, step and number; the run, and the shapes by name."""
    world, steps = len(own), len(own[0])
    sizes = {**TINY, "tied_embeddings": tied}
    state, lr = whole_state_of(t, sizes), 0.01
    fixed = {"sizes": sizes, "state": state, "frozen": frozen, "lr": lr, "dtype": "float64", "compute": None, "reduce": None}
    run = student.ranks(trained, [{**fixed, "steps": mine} for mine in own])
    at_once = [[batch for mine in own for batch in mine[step]] for step in range(steps)]
    losses, values = whole_training(sizes, state, frozen, at_once, lr)
    for rank, (got, shards) in enumerate(run.results):
        for step, (mine, right) in enumerate(zip(t.items(got, steps, "the losses"), losses)):
            what = "the loss of step {step} on rank {rank} of {world}"
            t.close(mine, right, what, step=step, rank=rank, world=world, rtol=1e-8, atol=1e-9)
        for name, right in values.items():
            rows, what = rows_of(right, rank, world), "{name} on rank {rank} of {world} in the end"
            t.close(shards.get(name), rows, what, name=name, rank=rank, world=world, rtol=1e-7, atol=1e-8)
    return run, {name: value.shape for name, value in values.items()}


@check("train", points=4, seconds=60)
def check_trains(student, t):
    "Three steps with unequal batches, tied and frozen weights: as one process"
    for world in (2, 3):
        frozen = [f"layers.{t.integer(0, 1)}.self_attn.o_proj.weight"]
        own = [[[batch_of(t, TINY, 1 + rank, 4, t.integer(1, 3))] for _ in range(3)] for rank in range(world)]
        train_run(student, t, own, frozen, tied=True)


@check("train", points=2, seconds=40)
def check_training_traffic(student, t):
    "The bytes of a step are those of the formula"
    world, frozen = 2, f"layers.{t.integer(0, 1)}.mlp.up_proj.weight"
    run, shapes = train_run(student, t, [[[batch_of(t, TINY, 2, 4)]] for _ in range(world)], [frozen], tied=False)
    blocks = packed_bytes([shape for name, shape in shapes.items() if name.startswith("layers.")], world, 8)
    gathers = packed_bytes(list(shapes.values()), world, 8) + blocks
    reduces = packed_bytes([shape for name, shape in shapes.items() if name != frozen], world, 8)
    for rank in range(world):
        got, sent = run.bytes(rank, Kind.ALL_GATHER), run.bytes(rank, Kind.REDUCE_SCATTER)
        message = "gathered twice: rank {rank} gathered {got} bytes; root once, blocks for forward and backward make {want}"
        t.that(got <= gathers, message, rank=rank, got=got, want=gathers)
        t.that(got == gathers, "rank {rank} gathered {got} bytes instead of {want}", rank=rank, got=got, want=gathers)
        t.that(sent == reduces, "rank {rank} reduce-scattered {sent} bytes instead of {want}", rank=rank, sent=sent, want=reduces)
        rest = run.bytes(rank) - got - sent
        message = "rank {rank} passed {rest} bytes beside gathers and reduce-scatters: loss and count are two numbers. Was a gradient communicated un-sharded?"
        t.that(rest <= 64, message, rank=rank, rest=rest)

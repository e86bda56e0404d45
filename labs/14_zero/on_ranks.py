"""The visible checks of what needs ranks: values on all of them, the bytes that passed between them, the memory of each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, check

from .scenarios import linear, norms, optimised, sharded_gradients, with_large_state
from .twins import ADAMW, large_state, linear_case, norm_case, steps_case, unsharded, whole_gradients

MIB = 2**20


Mistakes = Mapping[str, Tensor]


def no_mistake(t, got: Tensor, want: Tensor, mistakes: Mistakes) -> None:
    """``got`` is none of the wrong results, each under what is said of it; one that is right as well says nothing."""
    for message, wrong in mistakes.items():
        alike = got.shape == wrong.shape and torch.allclose(got, wrong, rtol=1e-5, atol=1e-8)
        t.that(not alike or torch.allclose(want, wrong, rtol=1e-5, atol=1e-8), message)


def cut(tensor: Tensor, rank: int, like: Tensor) -> Tensor:
    """What a rank with a piece of the size of ``like`` would have of ``tensor``, padded."""
    size = like.numel()
    flat = torch.nn.functional.pad(tensor.flatten(), (0, max(0, (rank + 1) * size - tensor.numel())))
    return flat[rank * size : (rank + 1) * size]


AVERAGE = "These are the gradients of all ranks, summed instead of averaged: divide by the number of ranks, once."
OWN = "Each rank has the piece of its own gradient only: what the other ranks have computed is lost. A reduce-scatter adds it up."

# -- the optimiser's state


def same_parameters(student, t, world: int, how: dict, without: int | None = None):
    """Parameters of all ranks are the twin's; the run, and the weights at the start."""
    weights, steps = steps_case(t, without)
    want = unsharded(weights, steps, **how)
    run = student.ranks(optimised, [{"weights": weights, "steps": steps, **how}] * world)
    for rank, got in enumerate(run.results):
        for i, (mine, its) in enumerate(zip(got, want)):
            if i != without:
                mistakes = {"A parameter is what it was before: copy the updated pieces of all ranks into it, in place.": weights[i]}
                no_mistake(t, t.tensor(mine, "parameter {i}", i=i), its, mistakes)
            t.close(mine, its, "parameter {i} on rank {rank} of {world} after three steps", i=i, rank=rank, world=world, atol=1e-10)
    return run, weights


@check("stage1", points=3, seconds=40)
def check_same_update(student, t):
    "Every rank has the parameters of an unsharded optimiser"
    for world in (1, 2, 3):
        same_parameters(student, t, world, ADAMW)


@check("stage1", points=1, seconds=20)
def check_updates_travel(student, t):
    "Only the updated pieces travel, in all-gathers"
    run, weights = same_parameters(student, t, 2, ADAMW)
    want = 3 * sum(2 * (-(-weight.numel() // 2)) * 8 for weight in weights)
    for rank in range(run.world):
        kinds = sorted({call.kind.value for call in run.calls(rank)})
        good = run.bytes(rank) == want and kinds == ["all_gather"]
        t.that(
            good,
            "rank {rank} passed {got} bytes in three steps ({kinds}); the pieces make all-gathers of {want}",
            rank=rank,
            got=run.bytes(rank),
            kinds=", ".join(kinds) or "no call",
            want=want,
        )


@check("stage1", points=3, seconds=40)
def check_state_is_divided(student, t):
    "The optimiser's state is divided: the memory of each process"
    numel, seed, world = 4 * MIB, t.integer(0, 999), 4
    run = student.ranks(with_large_state, [{"seed": seed, "numel": numel}] * world)
    want = large_state(seed, numel)
    for rank, got in enumerate(run.results):
        t.close(got, want, "the parameter on rank {rank}", rank=rank)
    for rank in range(world):
        held = run.memory(rank, "after the steps") / (4 * numel)
        t.that(
            held < 3.4,
            "rank {rank} holds {held:.1f} times the bytes of the parameter: parameter and gradient are 2, a fourth of AdamW's state and of the "
            "pieces 0.75. All of AdamW's state would be 2 more",
            rank=rank,
            held=held,
        )


# -- the norm


def same_norm(t, case: list[dict], got: list, want: Tensor) -> None:
    """The norm on every rank, as a scalar or as a tensor of one number."""
    norms = [torch.stack([piece.norm() for piece in own["grads"]]).norm() for own in case]
    for rank, each in enumerate(got):
        number = t.tensor(each, "the norm on rank {rank} of {world}", rank=rank, world=len(case))
        t.that(number.numel() == 1, "global_norm gives {count} numbers, it should give one", count=number.numel())
        mistakes = {
            "That is the square of the norm: the root is missing.": want**2,
            "The ranks' norms were added. Norms do not add up, their squares do.": torch.stack(norms).sum(),
            "That is the norm of the rank's own pieces: the squares of all ranks must be added.": norms[rank],
        }
        no_mistake(t, number.flatten()[0].float(), want, mistakes)
        t.close(number.flatten()[0].to(want.dtype), want, "the norm on rank {rank} of {world}", rank=rank, world=len(case), rtol=1e-5)


@check("norm", points=2, seconds=20)
def check_norm(student, t):
    "The norm of all gradients, on every rank"
    for world in (1, 2, 3):
        case, want = norm_case(t, [[t.integer(2, 9), t.integer(2, 9)]] * world)
        same_norm(t, case, student.ranks(norms, case).results, want)


@check("norm", points=1, seconds=20)
def check_one_number(student, t):
    "One number travels"
    case, want = norm_case(t, [[t.integer(2, 9)] * 2] * 2)
    run = student.ranks(norms, case)
    same_norm(t, case, run.results, want)
    for rank in range(run.world):
        good = len(run.calls(rank)) == 1 and run.bytes(rank) <= 8
        t.that(
            good,
            "{count} messages, {sent} bytes: add the squares here, then send one number",
            count=len(run.calls(rank)),
            sent=run.bytes(rank),
        )


# -- gradients


def same_shards(student, t, world: int, micro_batches: int):
    """The pieces of all ranks are those of the twin's gradients; the run, and the gradients."""
    widths = [t.integer(3, 7) for _ in range(4)]
    weights = [t.normal(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    batches = [[t.normal(4, widths[0], dtype=torch.float64) for _ in range(micro_batches)] for _ in range(world)]
    run = student.ranks(sharded_gradients, [{"weights": weights, "batches": own} for own in batches])
    want, alone = whole_gradients(weights, batches), [whole_gradients(weights, [own]) for own in batches]
    for grads, _ in run.results:
        late = any(grad is None for grad in grads) and any(grad is not None for grad in grads)
        t.that(
            not late,
            "Some pieces have a gradient and others none. A function that is made in a loop sees the loop's *last* piece: bind it, `piece=piece`.",
        )
    for i, whole in enumerate(want):
        got = [t.tensor(grads[i], "the gradient of piece {i}", i=i) for grads, _ in run.results]
        t.that(
            len({tuple(piece.shape) for piece in got}) == 1 and sum(piece.numel() for piece in got) >= whole.numel(),
            "the gradients of piece {i} on the ranks have shapes {shapes}: each has the shape of its piece",
            i=i,
            shapes=[tuple(piece.shape) for piece in got],
        )
        what, of_ranks = "the pieces of gradient {i} of {world} ranks together", torch.cat(got)[: whole.numel()]
        own = torch.cat([cut(alone[rank][i], rank, piece) for rank, piece in enumerate(got)])[: whole.numel()]
        no_mistake(t, of_ranks, whole.flatten(), {AVERAGE: world * whole.flatten(), OWN: own})
        t.close(torch.cat(got)[: whole.numel()], whole.flatten(), what, i=i, world=world, atol=1e-10)
    return run, want


@check("stage2", points=3, seconds=40)
def check_averaged_pieces(student, t):
    "Each rank has its pieces of the averaged gradients"
    for world in (1, 2, 3):
        same_shards(student, t, world, 1)


@check("stage2", points=2, seconds=20)
def check_reduce_scatter(student, t):
    "Half the bytes of DDP: reduce-scatters"
    run, grads = same_shards(student, t, 2, 1)
    want = sum(2 * (-(-grad.numel() // 2)) * 8 for grad in grads)
    for rank in range(run.world):
        kinds = sorted({call.kind.value for call in run.calls(rank)})
        t.that(
            run.ring_bytes(rank) == want / 2,
            "a ring sends {got:.0f} bytes for what rank {rank} did ({kinds}); reduce-scatters of the gradients send {want:.0f}",
            got=run.ring_bytes(rank),
            rank=rank,
            kinds=", ".join(kinds) or "no call",
            want=want / 2,
        )


@check("stage2", points=1, seconds=20)
def check_accumulates(student, t):
    "Micro-batches add up"
    same_shards(student, t, 2, t.integer(2, 3))


# -- parameters


def same_linear(student, t, world: int):
    """Outputs and gradients are those of the whole weight; the run, and the weight's gradient."""
    case, mean = linear_case(t, world)
    run = student.ranks(linear, case)
    for rank, (own, (out, of_x, _)) in enumerate(zip(case, run.results)):
        where = {"rank": rank, "world": world}
        t.close(out, own["x"] @ own["weight"].T, "the output on rank {rank} of {world}", atol=1e-10, **where)
        t.close(of_x, own["grad"] @ own["weight"], "the gradient of x on rank {rank} of {world}", atol=1e-10, **where)
    got = [t.tensor(of_piece, "weight_piece.grad on rank {rank}", rank=rank) for rank, (_, _, of_piece) in enumerate(run.results)]
    what = "the gradients of the pieces of {world} ranks together"
    own = torch.cat([cut(its["grad"].T @ its["x"], rank, piece) for rank, (its, piece) in enumerate(zip(case, got))])[: mean.numel()]
    no_mistake(t, torch.cat(got)[: mean.numel()], mean.flatten(), {AVERAGE: world * mean.flatten(), OWN: own})
    t.close(torch.cat(got)[: mean.numel()], mean.flatten(), what, world=world, atol=1e-10)
    return run, mean


@check("stage3", points=4, seconds=40)
def check_linear(student, t):
    "Output and gradients are those of the whole weight"
    for world in (1, 2, 3):
        same_linear(student, t, world)


@check("stage3", points=2, seconds=20)
def check_gathers(student, t):
    "At most two all-gathers and one reduce-scatter"
    run, mean = same_linear(student, t, 2)
    size = 2 * (-(-mean.numel() // 2)) * 8
    for rank in range(run.world):
        gathered, reduced = run.bytes(rank, Kind.ALL_GATHER), run.bytes(rank, Kind.REDUCE_SCATTER)
        others = sorted({call.kind.value for call in run.calls(rank)} - {"all_gather", "reduce_scatter"})
        t.that(not others, "{others} sends more than a reduce-scatter of the gradient would", others=", ".join(others))
        t.that(
            gathered <= 2 * size and reduced == size,
            "rank {rank} gathered {gathered} bytes and reduce-scattered {reduced}, of a weight of {size}",
            rank=rank,
            gathered=gathered,
            reduced=reduced,
            size=size,
        )

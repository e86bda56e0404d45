"""The visible checks on ranks: the values on all of them, the bytes between them, the memory of each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, check
from dlo_lib.labkit.compare import every_rank, explained, near, wrong_if
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.traffic import kinds_of, passes_at_most, passes_exactly, passes_only, uses_what_arrives

from .scenarios import (
    large_gradients,
    large_linear,
    linear,
    norms,
    offloaded,
    optimised,
    sharded_gradients,
    with_large_state,
)
from .state import NOTHING
from .twins import (
    ADAMW,
    large_output,
    large_state,
    linear_case,
    norm_case,
    offload_case,
    pieces_added,
    read_back,
    steps_case,
    sums_of_gradients,
    unsharded,
    whole_gradients,
    without_memory,
)


def cut(tensor: Tensor, rank: int, like: Tensor) -> Tensor:
    """The piece of ``tensor``, padded, of a rank whose piece has the size of ``like``."""
    size = like.numel()
    flat = torch.nn.functional.pad(tensor.flatten(), (0, max(0, (rank + 1) * size - tensor.numel())))
    return flat[rank * size : (rank + 1) * size]


AVERAGE = "These are the gradients of all ranks, summed instead of averaged: divide by the number of ranks, once."
TWICE = "These are the averages, divided by the number of ranks a second time: divide the gradient only once."
OWN = "Each rank has the piece of its gradient only: add the gradients of the other ranks, with a reduce-scatter."

# -- the optimiser's state

SHAPES = "copy_ needs two tensors of the same shape: whole(piece.data, parameter.shape) goes into parameter.data"
COPIED = {
    "leaf Variable that requires grad": "autograd refuses to change a parameter in place: write parameter.data.copy_(...)",
    "must match the size": SHAPES,
    "match the broadcast shape": SHAPES,
    "can't optimize a non-leaf": "the optimiser needs leaves: make each piece an nn.Parameter, nn.Parameter(piece_of(...))",
    "'NoneType' object has no attribute": "the .grad of a parameter is None in a step: give its piece None, and cut only what is not None",
}
ONE_BEFORE = "The parameters are those of one step before: run the optimiser's step before the pieces are sent."
FORGOTTEN = "Each step begins without the moments of the steps before: make the optimiser once, in __init__, and not in each step."
MIXED = "The gradients of different pieces were added: each rank has another piece, so no collective may add them."


def same_parameters(student, t, world: int, how: dict, without: int | None = None, sizes=None, wrong=None, missing=(0, 1, 2)):
    """Parameters of all ranks are the twin's; the run, the weights at the start, and the twin's parameters.

    ``wrong`` returns the parameters of known mistakes, by message, from the weights and steps.
    """
    weights, steps = steps_case(t, without, sizes, missing)
    want, known = unsharded(weights, steps, **how), {} if wrong is None else wrong(weights, steps)
    mixed = [[None if grad is None else pieces_added(grad, world) for grad in grads] for grads in steps]
    known |= {
        ONE_BEFORE: unsharded(weights, steps[:-1], **how),
        FORGOTTEN: without_memory(weights, steps, **how),
        MIXED: unsharded(weights, mixed, **how),
    }
    run = explained(student, optimised, [{"weights": weights, "steps": steps, **how}] * world, COPIED)
    for rank, (got, _) in enumerate(run.results):
        for i, (mine, its) in enumerate(zip(got, want)):
            mistakes = {message: values[i] for message, values in known.items()}
            if i != without:
                mistakes |= {"A parameter has not changed: copy the updated pieces of all ranks into it, in place.": weights[i]}
            wrong_if(t, t.tensor(mine, "parameter {i}", i=i), its, mistakes)
            t.close(mine, its, "parameter {i} on rank {rank} of {world} after three steps", i=i, rank=rank, world=world, atol=1e-10)
    return run, weights, want


@check("stage1", points=1, seconds=40)
def check_same_update(student, t):
    "Every rank has the parameters of an unsharded optimiser"
    for world in (1, 2, 3):
        same_parameters(student, t, world, ADAMW)


@check("stage1", points=1, seconds=20)
def check_in_place(student, t):
    "The parameters are changed in place"
    run, weights, want = same_parameters(student, t, 2, ADAMW)
    for _, memory in run.results:
        for mine, before, its in zip(memory, weights, want):
            message = (
                "A parameter has new memory, and the old memory still has the old values: what shares it (a bucket, a tied "
                "weight) never sees the update. Use parameter.data.copy_(...)."
            )
            wrong_if(t, t.tensor(mine, "the memory of a parameter"), its.flatten(), {message: before.flatten()})
            t.close(mine, its.flatten(), "the memory of a parameter after three steps", atol=1e-10)


@check("stage1", points=1, seconds=20)
def check_other_optimizer(student, t):
    "Another optimiser than AdamW"
    how = {"name": "SGD", "options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
    message = "The update is AdamW's, but make_optimizer returned SGD: use the optimiser that make_optimizer returns."
    twice = "The gradients are averages before step, and your code divides them by the number of ranks a second time."
    adamw = {"name": "AdamW", "options": {"lr": 0.1, "weight_decay": 0.01}}

    again = "The gradients are averages before step, and your code adds those of the ranks a second time."

    def known(weights, steps):
        halves, doubles = ([[grad * factor for grad in grads] for grads in steps] for factor in (0.5, 2))
        return {
            message: unsharded(weights, steps, **adamw),
            twice: unsharded(weights, halves, **how),
            again: unsharded(weights, doubles, **how),
        }

    same_parameters(student, t, 2, how, wrong=known)


@check("stage1", points=1, seconds=20)
def check_missing_gradient(student, t):
    "A parameter without gradient does not change, in any step"
    as_zeros = (
        "A parameter whose gradient is None has changed: with zeros as gradient AdamW still decays it. Give its piece None as gradient."
    )
    again = (
        "A parameter that had a gradient in one step and None in the next is moved by the *old* gradient, which its piece still had. "
        "Set piece.grad to None when the gradient is None."
    )

    def zeros(weights, steps):
        filled = [[torch.zeros_like(weight) if grad is None else grad for weight, grad in zip(weights, grads)] for grads in steps]
        return {as_zeros: unsharded(weights, filled, **ADAMW)}

    def kept(weights, steps):
        filled = [steps[0], [old if new is None else new for old, new in zip(steps[0], steps[1])], steps[2]]
        return {again: unsharded(weights, filled, **ADAMW)} | zeros(weights, steps)

    same_parameters(student, t, 2, ADAMW, without=t.integer(0, 2), wrong=zeros)
    same_parameters(student, t, 2, ADAMW, without=t.integer(0, 2), wrong=kept, missing=(1,))


@check("stage1", points=2, seconds=20)
def check_updates_travel(student, t):
    "Each updated number is sent once, and nothing else"
    run, weights, _ = same_parameters(student, t, 2, ADAMW)
    message = "rank {rank} calls {kinds}: all-gathers of the updated pieces are enough"
    passes_only(t, run, [Kind.ALL_GATHER, Kind.BROADCAST], message)
    want = 3 * sum(2 * (-(-weight.numel() // 2)) * 8 for weight in weights)
    message = "rank {rank} passed {got} bytes in three steps ({kinds}); all-gathers of the pieces have {want}"
    passes_at_most(t, run, want, message)
    least = 3 * sum(weight.nbytes for weight in weights)
    for rank in range(run.world):
        t.that(
            run.bytes(rank) >= least,
            "rank {rank} passed {got} bytes in three steps ({kinds}), but the parameters have {least}: a rank that updates only its "
            "pieces must receive the other ones. Here each rank computes updates that belong to others",
            rank=rank,
            got=run.bytes(rank),
            kinds=kinds_of(run, rank) or "no call",
            least=least,
        )
    uses_what_arrives(t, run)


@check("stage1", points=2, seconds=40)
def check_state_is_divided(student, t):
    "The optimiser's state is divided: the memory of each process"
    numel, seed, world = 4 * MIB, t.integer(0, 999), 4
    run = explained(student, with_large_state, [{"seed": seed, "numel": numel}] * world, COPIED)
    want = large_state(seed, numel, world)
    for rank, got in enumerate(run.results):
        for mine, its in zip(t.items(got, world, "the parameters"), want):
            t.close(mine, its, "a parameter on rank {rank}", rank=rank, rtol=1e-4, atol=1e-6)
    message = (
        "rank {rank} holds {held:.1f} times the bytes of the parameters: parameters and gradients are 2, a fourth of AdamW's "
        "state and of the pieces 0.75. The whole state of AdamW would be 2"
    )
    holds_at_most(t, run, "after the steps", 3.4 * 4 * numel, message, unit=4 * numel)


# -- the norm


def same_norm(t, case: list[dict], got: list, want: Tensor) -> None:
    """The norm on every rank, as a scalar or as a tensor of one number."""
    norms = [torch.stack([piece.norm() for piece in own["grads"]]).norm() for own in case]
    for rank, each in enumerate(got):
        t.that(each is not None, NOTHING, name="global_norm")
        number = t.tensor(each, "the norm on rank {rank} of {world}", rank=rank, world=len(case))
        t.that(number.numel() == 1, "global_norm returns {count} numbers, but should return one", count=number.numel())
        mistakes = {
            "The result is the square of the norm: the root is missing.": want**2,
            "The ranks' norms were added. Norms do not add up, their squares do.": torch.stack(norms).sum(),
            "The norms of all pieces were added. Norms do not add up, their squares do.": sum(
                piece.norm() for own in case for piece in own["grads"]
            ),
            "The squares were averaged over the ranks: they are parts of one sum, so add them.": want / len(case) ** 0.5,
            "The result is the norm of this rank's pieces only: add the squares of all ranks.": norms[rank],
        }
        wrong_if(t, number.flatten()[0].float(), want, mistakes)
        t.close(number.flatten()[0].to(want.dtype), want, "the norm on rank {rank} of {world}", rank=rank, world=len(case), rtol=1e-5)


@check("norm", points=2, seconds=20)
def check_norm(student, t):
    "The norm of all gradients, on every rank"
    for world in (1, 2, 3):
        case, want = norm_case(t, [[t.integer(2, 9), t.integer(2, 9)]] * world)
        same_norm(t, case, student.ranks(norms, case).results, want)


@check("norm", points=1, seconds=20)
def check_one_number(student, t):
    "One number is sent"
    case, want = norm_case(t, [[t.integer(2, 9)] * 2] * 2)
    run = student.ranks(norms, case)
    same_norm(t, case, run.results, want)
    passes_at_most(t, run, 8, "calls: {count}, bytes: {got}. Add the squares on each rank, then send one number", calls=1)
    uses_what_arrives(t, run, rank=t.integer(0, 1))


# -- gradients


LATE = (
    "Some pieces have a gradient and others have none. A function that is defined in a loop sees the *last* piece of "
    "the loop: bind it with `piece=piece`."
)
LAST = "Only the gradient of the last micro-batch is left: add to piece.grad when it is not None."
EARLY = (
    "the hook runs before parameter.grad is set (register_hook), or the gradient was removed before the hook used it: call "
    "register_post_accumulate_grad_hook, and set .grad to None at the end of the hook"
)
IN_HOOK = {
    "'NoneType' object has no attribute": EARLY,
    "unsupported operand type(s) for +=: 'NoneType'": "piece.grad is None before its first gradient: set it, and add only if it is not None",
    "unsupported operand type(s) for +: 'NoneType'": "piece.grad is None before its first gradient: set it, and add only if it is not None",
    "unsupported operand type(s) for /: 'NoneType'": EARLY,
}
AGAIN = "An earlier micro-batch counts twice: parameter.grad still had it. Set parameter.grad to None in the hook."


def same_shards(student, t, world: int, micro_batches: int):
    """The pieces of all ranks are those of the twin's gradients; the run, and the gradients."""
    widths = [*(t.choice([5, 7]) for _ in range(2)), *(t.integer(3, 7) for _ in range(2))]  # the first weight needs padding
    weights = [t.normal(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    batches = [[t.normal(4, widths[0], dtype=torch.float64) for _ in range(micro_batches)] for _ in range(world)]
    run = explained(student, sharded_gradients, [{"weights": weights, "batches": own} for own in batches], IN_HOOK)
    want, alone = whole_gradients(weights, batches), [whole_gradients(weights, [own]) for own in batches]
    for grads, _ in run.results:
        late = any(grad is None for grad in grads) and any(grad is not None for grad in grads)
        t.that(not late, LATE)
    for i, whole in enumerate(want):
        got = [t.tensor(grads[i], "the gradient of piece {i}", i=i) for grads, _ in run.results]
        t.that(
            len({tuple(piece.shape) for piece in got}) == 1 and sum(piece.numel() for piece in got) >= whole.numel(),
            "the gradients of piece {i} on the ranks have shapes {shapes}: each should have the shape of its piece",
            i=i,
            shapes=[tuple(piece.shape) for piece in got],
        )
        what, of_ranks = "the pieces of gradient {i} of all ranks together (world {world})", torch.cat(got)[: whole.numel()]
        own = torch.cat([cut(alone[rank][i], rank, piece) for rank, piece in enumerate(got)])[: whole.numel()]
        known = {AVERAGE: world * whole.flatten(), TWICE: whole.flatten() / world, OWN: own}
        if micro_batches > 1:
            each = [whole_gradients(weights, [[mine[number]] for mine in batches])[i].flatten() for number in range(micro_batches)]
            known |= {LAST: each[-1], AGAIN: sum((micro_batches - number) * grad for number, grad in enumerate(each))}
        wrong_if(t, of_ranks, whole.flatten(), known)
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
        t.that(
            run.ring_bytes(rank) == want / 2,
            "on a ring, the calls of rank {rank} ({kinds}) send {got:.0f} bytes, but reduce-scatters of the gradients send {want:.0f}: "
            "a rank needs the sum of its piece only",
            got=run.ring_bytes(rank),
            rank=rank,
            kinds=kinds_of(run, rank) or "no call",
            want=want / 2,
        )
    uses_what_arrives(t, run)


@check("stage2", points=1, seconds=20)
def check_accumulates(student, t):
    "Micro-batches add up"
    same_shards(student, t, 2, t.integer(2, 3))


@check("stage2", points=2, seconds=40)
def check_gradients_are_divided(student, t):
    "No rank keeps a whole gradient: the memory of each process"
    seed, width = t.integer(0, 999), 1448
    run = explained(student, large_gradients, [{"seed": seed, "rows": 4, "width": width}] * 2, IN_HOOK)
    for sums in run.results:
        t.that(len({total is None for total in t.items(sums, 2, "the gradients of the pieces")}) == 1, LATE)
    for i, want in enumerate(sums_of_gradients(seed, 4, width)):
        own = [t.number(sums[i], "the sum of the gradient of piece {i} on a rank", i=i) for sums in run.results]
        wrong_if(t, sum(own), want, {AVERAGE: 2 * want, TWICE: want / 2}, rtol=1e-2, atol=1e-4)
        t.close(sum(own), want, "the sum of gradient {i}", i=i, rtol=1e-2, atol=1e-4)
    both = 2 * 4 * width**2
    message = (
        "rank {rank} holds {held:.1f} times the bytes of the weights after backward: weights 1, pieces and their gradients 0.5 each. "
        "A whole gradient is still in memory: set parameter.grad to None, and keep no reference to it"
    )
    holds_at_most(t, run, "after backward", 2.5 * both, message, unit=both)


# -- parameters


NO_OUTPUT = "sharded_linear returns None: is a return missing, in it or in the function that the checkpoint runs?"
NOT_TRANSPOSED = "x is multiplied by the weight and not by its transpose: F.linear(x, weight) is x @ weight.T"
NO_WAY_BACK = (
    "weight_piece gets no gradient: gather it with Gather.apply(weight_piece, shape), because autograd does not pass through whole"
)
BACKWARD = {
    "incorrect number of gradients": "backward returns one value for each argument of forward after ctx: the gradient of the piece, and "
    "None for the shape",
    "'weight' (position 2) must be Tensor, not NoneType": "Gather.apply returns None: is a return missing in its forward?",
    "no attribute 'backward'": NO_OUTPUT,
    "'input' (position 1) must be Tensor, not NoneType": NO_OUTPUT,
    "does not have a grad_fn": NO_WAY_BACK,
    "shapes cannot be multiplied": NOT_TRANSPOSED,
}


def same_linear(student, t, world: int):
    """Outputs and gradients are those of the whole weight; the run, and the weight's gradient."""
    case, mean = linear_case(t, world)
    run = explained(student, linear, case, BACKWARD)
    for rank, (own, (out, of_x, _)) in enumerate(zip(case, run.results)):
        where = {"rank": rank, "world": world}
        if own["weight"].shape[0] == own["weight"].shape[1]:
            wrong_if(t, out, own["x"] @ own["weight"].T, {NOT_TRANSPOSED: own["x"] @ own["weight"]})
        t.close(out, own["x"] @ own["weight"].T, "the output on rank {rank} of {world}", atol=1e-10, **where)
        t.close(of_x, own["grad"] @ own["weight"], "the gradient of x on rank {rank} of {world}", atol=1e-10, **where)
    t.that(all(of_piece is not None for _, _, of_piece in run.results), NO_WAY_BACK)
    got = [t.tensor(of_piece, "weight_piece.grad on rank {rank}", rank=rank) for rank, (_, _, of_piece) in enumerate(run.results)]
    what = "the gradients of the pieces of all ranks together (world {world})"
    own = torch.cat([cut(its["grad"].T @ its["x"], rank, piece) for rank, (its, piece) in enumerate(zip(case, got))])[: mean.numel()]
    known = {AVERAGE: world * mean.flatten(), TWICE: mean.flatten() / world, OWN: own}
    wrong_if(t, torch.cat(got)[: mean.numel()], mean.flatten(), known)
    t.close(torch.cat(got)[: mean.numel()], mean.flatten(), what, world=world, atol=1e-10)
    return run, mean


@check("stage3", points=3, seconds=40)
def check_linear(student, t):
    "Output and gradients are those of the whole weight"
    for world in (1, 2, 3):
        same_linear(student, t, world)


@check("stage3", points=1, seconds=20)
def check_passes_add_up(student, t):
    "Micro-batches add up in weight_piece.grad"
    case, mean = linear_case(t, 2)
    run = explained(student, linear, [{**own, "passes": 2} for own in case], BACKWARD)
    t.that(all(of_piece is not None for _, _, of_piece in run.results), NO_WAY_BACK)
    got = torch.cat([t.tensor(of_piece, "weight_piece.grad") for _, _, of_piece in run.results])[: mean.numel()]
    last = "After two passes weight_piece.grad has the gradient of one: return it from backward, and autograd adds it."
    wrong_if(t, got, 2 * mean.flatten(), {last: mean.flatten()})
    t.close(got, 2 * mean.flatten(), "the gradients of the pieces of all ranks together, after two passes", atol=1e-10)


@check("stage3", points=2, seconds=20)
def check_gathers(student, t):
    "At most two all-gathers and one reduce-scatter"
    run, mean = same_linear(student, t, 2)
    size = 2 * (-(-mean.numel() // 2)) * 8
    message = "{kinds} sends more than a reduce-scatter of the gradient"
    passes_only(t, run, [Kind.ALL_GATHER, Kind.REDUCE_SCATTER], message)
    for rank in range(run.world):
        gathered, reduced = run.bytes(rank, Kind.ALL_GATHER), run.bytes(rank, Kind.REDUCE_SCATTER)
        t.that(
            gathered <= 2 * size and reduced == size,
            "rank {rank} gathered {gathered} bytes and reduce-scattered {reduced}, but the weight has {size}: "
            "gather it at most twice, reduce it once",
            rank=rank,
            gathered=gathered,
            reduced=reduced,
            size=size,
        )
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        uses_what_arrives(t, run, kind)


@check("stage3", points=2, seconds=40)
def check_weights_are_freed(student, t):
    "After forward no rank holds a whole weight: the memory of each process"
    seed, width = t.integer(0, 999), 1448
    run = explained(student, large_linear, [{"seed": seed, "width": width}] * 4, BACKWARD)
    want = large_output(seed, width)
    every_rank(t, run, want, "the output of three layers on rank {rank}", rtol=1e-3, atol=1e-4)
    message = (
        "rank {rank} holds {held:.1f} times the bytes of a weight after forward, but its pieces of three weights have 0.75: "
        "either F.linear saves its weight for backward, because it runs outside of a checkpoint, or the whole weight is an "
        "*argument* of the checkpoint, which keeps its arguments: gather inside the function that the checkpoint runs"
    )
    holds_at_most(t, run, "after forward", 2 * 4 * width**2, message, unit=4 * width**2)


# -- offload

SMALL_STEPS = {"name": "AdamW", "options": {"lr": 0.002, "weight_decay": 0.1}}  # each is less than half the spacing of bf16
LARGE_STEP = {"name": "AdamW", "options": {"lr": 0.25, "weight_decay": 0.1}}
FP32 = (
    'a master or its gradient is in 16 bits: make the master with .to("cpu", torch.float32, copy=True), and cast the gradient with .float()'
)
OFFLOADED = {
    "a gradient with dtype 'float'": 'the masters are in 16 bits: make them in fp32, with .to("cpu", torch.float32, copy=True)',
    "a gradient with dtype": "a master needs a gradient in fp32: cast that of the piece with .float()",
    "grad has data of a different type": FP32,
    "leaf Variable that requires grad": "autograd refuses to change a piece in place: write piece.data.copy_(...)",
    "match the size": "copy_ needs two tensors of the same shape: each master goes into its own piece",
}


def same_offloaded(student, t, without: int | None = None, first: bool = False):
    """After one large step the pieces are the twin's; what the run returned, the pieces at the start, and the twin's pieces.

    ``first``: a step with all gradients comes before.
    """
    values, steps = offload_case(t, without, 1)
    if first:
        steps = [[(value - 2).sign() for value in values], *steps]
    (got,) = explained(student, offloaded, [{"values": values, "steps": steps, **LARGE_STEP}], OFFLOADED).results
    want = [master.bfloat16() for master in unsharded(*in_fp32(values, steps), **LARGE_STEP)]
    for i, (piece, start) in enumerate(zip(got[0], values)):
        if i != without:
            message = "A piece has not changed: copy the new values of its master into the piece."
            wrong_if(t, t.tensor(piece, "piece {i}", i=i), want[i], {message: start})
        else:
            message = "A piece without gradient has changed: its master needs None as gradient. Zeros, or an earlier gradient, move it."
            t.that(near(t.tensor(piece, "piece {i}", i=i), want[i], rtol=2**-6, atol=0), message)
        t.close(piece, want[i], "piece {i} after a step", i=i, rtol=2**-6, atol=0)
    return got, values, want


def in_fp32(values, steps):
    """Pieces and gradients of masters."""
    return [value.float() for value in values], [[None if grad is None else grad.float() for grad in grads] for grads in steps]


@check("offload", points=2)
def check_offloaded(student, t):
    "Masters in fp32 and pieces in 16 bits have the update of an unsharded optimiser"
    values, steps = offload_case(t)
    ((pieces, _, masters, _),) = explained(student, offloaded, [{"values": values, "steps": steps, **SMALL_STEPS}], OFFLOADED).results
    want = unsharded(*in_fp32(values, steps), **SMALL_STEPS)
    for i, (piece, master) in enumerate(zip(pieces, t.items(masters, len(values), "the parameters that make_optimizer gets"))):
        kind = t.tensor(master, "master {i}", i=i).dtype
        message = "master {i} is {kind}, not torch.float32: an update of less than half the spacing of 16-bit numbers is rounded away"
        t.that(kind == torch.float32, message, i=i, kind=str(kind))
        message = (
            "After {count} steps the masters are those of masters that are read back from the rounded pieces, so small updates are "
            "lost: make the masters once, in __init__, and only write into the pieces"
        )
        rounded = read_back(values, steps, **SMALL_STEPS)[i]
        early, late = rounded, rounded.bfloat16().float()  # before a step, or after it
        wrong_if(t, master, want[i], {message: early}, rtol=1e-5, atol=1e-6, count=len(steps))
        wrong_if(t, master, want[i], {message: late}, rtol=1e-5, atol=1e-6, count=len(steps))
        t.close(master, want[i], "master {i} after {count} steps", i=i, count=len(steps), rtol=1e-5, atol=1e-6)
        message = "A piece has not changed, although its master has: copy the new values into the piece."
        wrong_if(t, t.tensor(piece, "piece {i}", i=i), want[i].bfloat16(), {message: values[i]})
        t.close(piece, want[i].bfloat16(), "piece {i} after {count} steps", i=i, count=len(steps), rtol=2**-7, atol=0)


@check("offload", points=1)
def check_pieces_in_place(student, t):
    "The pieces are changed in place"
    (_, memory, _, _), values, want = same_offloaded(student, t)
    message = "A piece has new memory, and its old memory still has the old values. Use piece.data.copy_(...)."
    for mine, before, its in zip(memory, values, want):
        wrong_if(t, t.tensor(mine, "the memory of a piece"), its, {message: before})
        t.close(mine, its, "the memory of a piece after a step", rtol=2**-6, atol=0)


@check("offload", points=1)
def check_no_gradient_left(student, t):
    "After the step no gradient is left"
    (_, _, _, left), _, _ = same_offloaded(student, t)
    for found, who in zip(t.items(left, 2, "what is left"), ("piece", "master")):
        message = "After the step a {who} still has a gradient: it needs memory until the next backward. Set {who}.grad to None"
        t.that(found is False, message, who=who)


@check("offload", points=1)
def check_piece_without_gradient(student, t):
    "A piece without gradient does not change"
    same_offloaded(student, t, without=t.integer(0, 1))
    same_offloaded(student, t, without=t.integer(0, 1), first=True)

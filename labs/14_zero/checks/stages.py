"""The visible checks on ranks: the values on all of them, the bytes between them, the memory of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, check
from dlo_lib.labkit.compare import every_rank, explained, near, same, wrong_if
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.traffic import (
    kinds_of,
    passes_at_least,
    passes_at_most,
    passes_exactly,
    passes_only,
    uses_what_arrives,
)

from . import scenarios, twins
from .scenarios import norms
from .state import NOTHING, ROOM
from .twins import ADAMW


def cut(tensor: Tensor, rank: int, like: Tensor) -> Tensor:
    """The piece of ``tensor``, padded, of a rank whose piece has the size of ``like``."""
    size = like.numel()
    flat = torch.nn.functional.pad(tensor.flatten(), (0, max(0, (rank + 1) * size - tensor.numel())))
    return flat[rank * size : (rank + 1) * size]


AVERAGE = "The gradients of all ranks are summed instead of averaged: divide by the number of ranks, once."
TWICE = "These are the averages, divided by the number of ranks a second time: divide the gradient only once."
OWN = "Each rank has the piece of its gradient only: add those of the other ranks, with a reduce-scatter."

# -- the optimiser's state

SHAPES = "copy_ needs two tensors of one shape: whole(piece.data, parameter.shape) goes into parameter.data"
COPIED = {
    "leaf Variable that requires grad": (
        "autograd refuses a change in place: write parameter.data.copy_(...)"
    ),
    "must match the size": SHAPES,
    "match the broadcast shape": SHAPES,
    "make_optimizer is called again": (
        "make_optimizer is called again: call it once, in __init__, with the list of all pieces"
    ),
    "that is no nn.Parameter": (
        "make_optimizer gets a tensor that is no nn.Parameter: use nn.Parameter(piece_of(...))"
    ),
    "can't optimize a non-leaf": ("the optimiser needs leaves: write nn.Parameter(piece_of(...))"),
    "'NoneType' object has no attribute": (
        "the .grad of a parameter is None in a step: give its piece None, and cut only what is not None"
    ),
}
OTHERS_PIECES = (
    "parameter {i} on rank {rank} of {world} is NaN. Here a rank has the gradient of its pieces alone, and "
    "NaN in the place of the others: make_optimizer gets a piece of each parameter, and each updated piece "
    "comes from the rank that has its gradient"
)
TOGETHER = (
    "parameter {i} on rank {rank} of {world} is not updated by one optimiser of a piece of each parameter, "
    "one-dimensional. The optimiser of this check divides by the norm of all gradients that it has, so its "
    "updates show of what it was made"
)
ONE_BEFORE = (
    "The parameters are those of one step before: run the optimiser's step before you send the pieces."
)
FORGOTTEN = "Each step begins without the moments of the steps before: make the optimiser once, in __init__."
MIXED = (
    "Gradients of different pieces were added: each rank has another piece, so no collective may add them."
)


UNFINISHED = (
    "on rank {rank} {name} ends before its messages are done: wait for every message, and for the thread if "
    "a thread sends"
)
LATE_RANK = ". Rank {late} begins later than the others here"


def returned_when_done(t, run, name: str, late: int) -> None:
    """No message of a rank is open at the mark "returned", and none comes later."""
    for rank in range(run.world):
        done = run.calls_before(rank, "returned") == len(run.calls(rank)) and not run.open_calls(
            rank, "returned"
        )
        t.that(done, UNFINISHED + (LATE_RANK if late >= 0 else ""), rank=rank, name=name, late=late)


def precision(dtype: torch.dtype) -> dict[str, float]:
    """The tolerance of results that differ by the order of additions."""
    return {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}


UNCHANGED = "A parameter has not changed: copy the updated pieces of all ranks into it, in place."


def same_parameters(student, t, world: int, how: dict, wrong=None, shapes=None, late: int = -1, **options):
    """Parameters of all ranks are the twin's; the run, the weights at the start, and the twin's parameters.

    ``wrong`` returns the parameters of known mistakes, by message, from the weights and steps; ``options``
    are those of ``steps_case``.
    """
    weights, steps = twins.steps_case(t, shapes or twins.shapes_of_parameters(t, world), **options)
    want, known = twins.unsharded(weights, steps, **how), {} if wrong is None else wrong(weights, steps)
    mixed = [[None if grad is None else twins.pieces_added(grad, world) for grad in grads] for grads in steps]
    known |= {
        ONE_BEFORE: twins.unsharded(weights, steps[:-1], **how),
        FORGOTTEN: twins.without_memory(weights, steps, **how),
        MIXED: twins.unsharded(weights, mixed, **how),
        UNCHANGED: [want[i] if i == options.get("without") else weight for i, weight in enumerate(weights)],
    }
    inputs = {"weights": weights, "steps": steps, "late": late, **how}
    run = explained(student, scenarios.optimised, [inputs] * world, COPIED)
    returned_when_done(t, run, "step", late)
    what = "parameter {i} on rank {rank} of {world} after {count} steps"
    for rank, (got, _) in enumerate(run.results):
        values = {"rank": rank, "world": world, "count": len(steps)}
        same(t, got, want, what, known, **precision(want[0].dtype), **values)
    return run, weights, want


@check("stage1", points=1, seconds=40)
def check_same_update(student, t):
    "Every rank has the parameters of an unsharded optimiser"
    for world, dtype in ((1, torch.float32), (t.integer(3, 5), torch.float64)):
        shapes = twins.shapes_of_parameters(t, world, t.integer(1, 4))
        same_parameters(student, t, world, ADAMW, shapes=shapes, count=t.integer(5, 7), dtype=dtype)


@check("stage1", points=1, seconds=20)
def check_one_optimizer(student, t):
    "One optimiser, made once, of one piece of each parameter"
    world, lr = 3, 0.25  # as many as parameters: no rank is without one
    shapes, dtypes = (
        twins.shapes_of_parameters(t, world),
        t.shuffled([torch.float32, torch.float64, torch.float64]),
    )
    weights, *steps = (
        [t.normal(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)] for _ in range(4)
    )
    inputs = [
        {"steps": [[twins.of_rank(grad, rank, world) for grad in grads] for grads in steps]}
        for rank in range(world)
    ]
    inputs = [{"weights": weights, "lr": lr, **own} for own in inputs]
    run = explained(student, scenarios.optimised_together, inputs, COPIED)
    want = twins.together(weights, steps, world, lr)
    for rank, got in enumerate(run.results):
        for i, (mine, its) in enumerate(zip(t.items(got, len(want), "the parameters"), want)):
            values = {"i": i, "rank": rank, "world": world}
            nan = type(mine) is Tensor and bool(mine.isnan().any())
            t.that(not nan, OTHERS_PIECES, **values)
            what = "parameter {i} on rank {rank}, of parameters with different dtypes,"
            near_enough = precision(torch.float32)  # the norm has the rounding of the gradients in fp32
            t.that(near(mine, its, **near_enough) or near(mine, weights[i]), TOGETHER, **values)
            t.close(mine, its, what, i=i, rank=rank, **near_enough)


@check("stage1", points=1, seconds=20)
def check_in_place(student, t):
    "The parameters are changed in place"
    run, weights, want = same_parameters(student, t, 2, ADAMW)
    for _, memory in run.results:
        for mine, before, its in zip(memory, weights, want):
            message = (
                "A parameter has new memory, and the old memory still has the old values: what shares it (a "
                "bucket, a tied weight) never sees the update. Use parameter.data.copy_(...)."
            )
            wrong_if(
                t, t.tensor(mine, "the memory of a parameter"), its.flatten(), {message: before.flatten()}
            )
            t.close(mine, its.flatten(), "the memory of a parameter after the steps", **precision(its.dtype))


OTHERS = {
    "RMSprop": {"lr": 0.02, "momentum": 0.5},
    "Adagrad": {"lr": 0.3, "lr_decay": 0.1},
    "Adamax": {"lr": 0.05, "weight_decay": 0.1},
}


@check("stage1", points=1, seconds=20)
def check_other_optimizer(student, t):
    "Other optimisers than AdamW"
    how = {"name": "SGD", "options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
    message = "The update is AdamW's, but make_optimizer returned SGD: use what make_optimizer returns."
    twice = "The gradients are averages before step, and your code divides them by the ranks a second time."
    adamw = {"name": "AdamW", "options": {"lr": 0.1, "weight_decay": 0.01}}
    again, world = (
        "The gradients are averages before step, and your code adds those of the ranks a second time.",
        2,
    )

    def known(weights, steps):
        shares, sums = (
            [[grad * factor for grad in grads] for grads in steps] for factor in (1 / world, world)
        )
        return {
            message: twins.unsharded(weights, steps, **adamw),
            twice: twins.unsharded(weights, shares, **how),
            again: twins.unsharded(weights, sums, **how),
        }

    same_parameters(student, t, world, how, wrong=known)
    name = t.choice(list(OTHERS))
    same_parameters(student, t, 3, {"name": name, "options": OTHERS[name]})


@check("stage1", points=1, seconds=20)
def check_missing_gradient(student, t):
    "A parameter without gradient does not change, in any step"
    as_zeros = (
        "A parameter whose gradient is None has changed: with zeros as gradient AdamW still decays it. Give "
        "its piece None as gradient."
    )
    again = (
        "A parameter that had a gradient in one step and None in the next is moved by the *old* gradient, "
        "which its piece still had. Set piece.grad to None when the gradient is None."
    )

    def zeros(weights, steps):
        filled = [
            [torch.zeros_like(weight) if grad is None else grad for weight, grad in zip(weights, grads)]
            for grads in steps
        ]
        return {as_zeros: twins.unsharded(weights, filled, **ADAMW)}

    def kept(weights, steps):
        filled = [steps[0], [old if new is None else new for old, new in zip(steps[0], steps[1])], steps[2]]
        return {again: twins.unsharded(weights, filled, **ADAMW)} | zeros(weights, steps)

    same_parameters(student, t, 2, ADAMW, without=t.integer(0, 2), wrong=zeros)
    same_parameters(student, t, 2, ADAMW, without=t.integer(0, 2), wrong=kept, missing=(1,))


@check("stage1", points=2, seconds=20)
def check_updates_travel(student, t):
    "Each updated number is sent once, and nothing else, before step returns"
    world, count = t.integer(3, 4), t.integer(5, 6)
    late = t.integer(0, world - 1)
    run, weights, _ = same_parameters(student, t, world, ADAMW, count=count, late=late)
    message = "rank {rank} calls {kinds}: all-gathers of the updated pieces are enough"
    passes_only(t, run, [Kind.ALL_GATHER, Kind.BROADCAST], message)
    message = "rank {rank} passed {got} bytes in {steps} steps ({kinds}); all-gathers of pieces have {want}"
    passes_at_most(t, run, count * twins.padded_bytes(weights, world), message, steps=count)
    message = (
        "rank {rank} passed {got} bytes in {steps} steps ({kinds}), but the parameters have {want}: a rank "
        "that updates only its pieces must receive the other ones. Here each rank computes updates of others"
    )
    passes_at_least(t, run, count * sum(weight.nbytes for weight in weights), message, steps=count)
    rank = t.integer(0, world - 1)
    last = run.calls(rank)[run.calls_before(rank, "last step") :]  # it replaces what came before
    received = [call for call in last if call.kind is not Kind.BROADCAST or call.peer != rank]
    # Not the last message, because an answer could use that one alone.
    uses_what_arrives(t, run, rank=rank, call=-t.integer(min(2, len(received)), max(1, len(received))))


@check("stage1", points=2, seconds=40)
def check_state_is_divided(student, t):
    "The optimiser's state is divided: the memory of each process"
    numel, seed, world = MIB, t.integer(0, 999), 3
    run = explained(student, scenarios.with_large_state, [{"seed": seed, "numel": numel}] * world, COPIED)
    every_rank(t, run, [twins.large_state(seed, numel, world)] * world, "parameter {i} on rank {rank}")
    message = (
        "rank {rank} holds {held:.1f} times the bytes of the parameters after a step, without their "
        "gradients: the parameters are 1, and this rank's pieces, their gradients and their three moments "
        "(AdamW with amsgrad) {parts:.1f}. All moments would be 3"
    )
    most, whole = (1 + 5 / world) * 4 * numel + ROOM, 4 * numel
    for rank in range(world):
        passed = 0 < run.calls_before(rank, "after a step") < len(run.calls(rank))
        t.that(passed, "rank {rank} sends nothing in one of the two steps", rank=rank)
    for mark in ("after a step", "after the steps"):
        holds_at_most(t, run, mark, most, message, unit=whole, parts=5 / world)


# -- the norm


def same_norm(t, case: list[dict], got: list, want: Tensor) -> None:
    """The norm on every rank, and unchanged pieces."""
    norms = [torch.stack([piece.norm() for piece in own["grads"]]).norm() for own in case]
    of_pieces = sum(piece.norm() for own in case for piece in own["grads"])
    for rank, (each, after) in enumerate(got):
        unchanged = all(bool(torch.equal(mine, its)) for mine, its in zip(after, case[rank]["grads"]))
        message = "global_norm changes the pieces: the optimiser needs the gradients, so square a copy"
        t.that(unchanged, message)
        t.that(each is not None, NOTHING, name="global_norm")
        number = t.tensor(each, "the norm on rank {rank} of {world}", rank=rank, world=len(case))
        message = "global_norm returns {count} numbers, but should return one"
        t.that(number.numel() == 1, message, count=number.numel())
        message = "global_norm returns a tensor of shape {shape}: a scalar has shape ()"
        t.that(number.dim() == 0, message, shape=tuple(number.shape))
        mistakes = {
            "The result is the square of the norm: the root is missing.": want**2,
            "The ranks' norms were added. Norms do not add up, their squares do.": torch.stack(norms).sum(),
            "The norms of all pieces were added. Norms do not add up, their squares do.": of_pieces,
            "The squares were averaged: they are parts of one sum, so add them.": want / len(case) ** 0.5,
            "The result is the norm of this rank's pieces only: add the squares of all ranks.": norms[rank],
        }
        wrong_if(t, number.to(want.dtype), want, mistakes)
        what = "the norm on rank {rank} of {world}"
        t.close(number.to(want.dtype), want, what, rank=rank, world=len(case), rtol=1e-5)


@check("norm", points=2, seconds=20)
def check_norm(student, t):
    "The norm of all gradients, on every rank"
    for world, dtype in ((1, torch.float64), (t.integer(3, 5), torch.float32)):
        count = t.integer(3, 5)
        case, want = twins.norm_case(
            t, [[t.integer(2, 9) for _ in range(count)] for _ in range(world)], dtype
        )
        same_norm(t, case, student.ranks(norms, case).results, want)


@check("norm", points=1, seconds=20)
def check_one_number(student, t):
    "One number is sent"
    world, count = t.integer(3, 4), t.integer(3, 5)
    case, want = twins.norm_case(t, [[t.integer(2, 9) for _ in range(count)] for _ in range(world)])
    run = student.ranks(norms, case)
    same_norm(t, case, run.results, want)
    message = (
        "rank {rank} passes {got} bytes in {count} calls ({kinds}). Add the squares on each rank, then send "
        "one number, {one} bytes, in one call"
    )
    one = want.element_size()  # an all-gather of one number of each rank passes all of them
    each = [one * (world if run.calls(rank, Kind.ALL_GATHER) else 1) for rank in range(world)]
    passes_exactly(t, run, each, message, calls=1, one=one)
    uses_what_arrives(t, run, rank=t.integer(0, world - 1))


# -- gradients


LATE = (
    "Some pieces have a gradient and others have none. A function that is defined in a loop sees the *last* "
    "piece of the loop: bind it with `piece=piece`."
)
NONE = "after backward no piece has a gradient: the hook of a parameter sets piece.grad before it returns"
LAST = "Only the gradient of the last micro-batch is left: add to piece.grad when it is not None."
EARLY = (
    "the hook runs before parameter.grad is set (register_hook), or the gradient was removed before the "
    "hook used it: call register_post_accumulate_grad_hook, and set .grad to None at the end of the hook"
)
FIRST = "piece.grad is None before its first gradient: set it, and add only if it is not None"
IN_HOOK = {
    "'NoneType' object has no attribute": EARLY,
    "unsupported operand type(s) for +=: 'NoneType'": FIRST,
    "unsupported operand type(s) for +: 'NoneType'": FIRST,
    "unsupported operand type(s) for /: 'NoneType'": EARLY,
}
AGAIN = "An earlier micro-batch counts twice: parameter.grad still had it. Set it to None in the hook."


def same_pieces(
    t, got: list, whole: Tensor, alone: list[Tensor], what: str, mistakes: dict[str, Tensor], **values: object
) -> None:
    """The gradients of the pieces of all ranks are together that of the whole, the average of ``alone``."""
    got = [
        t.tensor(mine, "the gradient of a piece on rank {rank}", rank=rank) for rank, mine in enumerate(got)
    ]
    shapes, numel, flat = [tuple(piece.shape) for piece in got], whole.numel(), whole.flatten()
    message = "the gradients of a piece on the ranks have shapes {shapes}: each should have that of its piece"
    same_shapes = len(set(shapes)) == 1 and sum(piece.numel() for piece in got) >= numel
    t.that(same_shapes, message, shapes=shapes)
    own = torch.cat([cut(alone[rank], rank, piece) for rank, piece in enumerate(got)])[:numel]
    known = {AVERAGE: len(got) * flat, TWICE: flat / len(got), OWN: own, **mistakes}
    same(t, torch.cat(got)[:numel], flat, what, known, **precision(whole.dtype), world=len(got), **values)
    message = (
        "the gradient of a piece is not zero where the piece is padding (world {world}): append zeros to the "
        "gradient, as in step 2"
    )
    t.that(not bool(torch.cat(got)[numel:].any()), message, world=len(got))


def same_shards(student, t, world: int, micro_batches: int = 1, dtype=torch.float64, **options):
    """The pieces of all ranks are those of the twin's gradients; the run, and the gradients. ``options`` are
    those of the scenario."""
    first = [t.choice([5, 7]) for _ in range(2)]  # the first weight needs padding
    widths = [*first, *(t.integer(3, 7) for _ in range(t.integer(1, 3)))]
    weights = [t.normal(a, b, dtype=dtype) for a, b in itertools.pairwise(widths)]
    bias = t.normal(1, dtype=dtype)  # fewer numbers than ranks
    weights.insert(t.integer(1, len(weights)), bias)
    batches = [[t.normal(4, widths[0], dtype=dtype) for _ in range(micro_batches)] for _ in range(world)]
    inputs = [{"weights": weights, "batches": own, **options} for own in batches]
    run = explained(student, scenarios.sharded_gradients, inputs, IN_HOOK)
    returned_when_done(t, run, "backward", options.get("late", -1))
    want, alone = (
        twins.whole_gradients(weights, batches),
        [twins.whole_gradients(weights, [own]) for own in batches],
    )
    for grads, _ in run.results:
        none = [grad is None for grad in grads]
        t.that(all(none) or not any(none), LATE)
        t.that(not all(none), NONE)
    of_batches = [twins.whole_gradients(weights, [[own[n]] for own in batches]) for n in range(micro_batches)]
    for i, whole in enumerate(want):
        each = [grads[i].flatten() for grads in of_batches]
        again = sum((micro_batches - number) * grad for number, grad in enumerate(each))
        got, known = [grads[i] for grads, _ in run.results], {LAST: each[-1], AGAIN: again}
        what = "the pieces of gradient {i} of all ranks together (world {world})"
        same_pieces(t, got, whole, [grads[i] for grads in alone], what, known, i=i)
    return run, want


@check("stage2", points=3, seconds=40)
def check_averaged_pieces(student, t):
    "Each rank has its pieces of the averaged gradients"
    for world, dtype in ((1, torch.float32), (t.integer(3, 5), torch.float64)):
        same_shards(student, t, world, dtype=dtype)


@check("stage2", points=2, seconds=20)
def check_reduce_scatter(student, t):
    "Half the bytes of DDP: reduce-scatters"
    world = t.integer(3, 4)
    late = t.integer(0, world - 1)
    run, grads = same_shards(student, t, world, late=late)
    want = twins.padded_bytes(grads, world) * (world - 1) / world
    message = (
        "on a ring, the calls of rank {rank} ({kinds}) send {got:.0f} bytes, but reduce-scatters of the "
        "gradients send {want:.0f}: a rank needs the sum of its piece only"
    )
    for rank in range(run.world):
        got, kinds = run.ring_bytes(rank), kinds_of(run, rank) or "no call"
        t.that(abs(got - want) < 1, message, got=got, rank=rank, kinds=kinds, want=want)
    message = "rank {rank} also calls {kinds}: a reduce-scatter for each parameter is enough"
    passes_only(t, run, [Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL], message)
    uses_what_arrives(t, run, rank=t.integer(0, world - 1), call=t.integer(0, 99))


@check("stage2", points=1, seconds=20)
def check_during_backward(student, t):
    "A gradient is reduced as soon as it is complete, while backward runs"
    world = t.integer(3, 4)
    run, grads = same_shards(student, t, world, marked=True)
    for rank in range(world):
        kinds = [call.kind for call in run.calls(rank)]
        sent = kinds.index(Kind.BARRIER)
        message = (
            "when the gradient of the first parameter is computed, the last one of backward, rank {rank} "
            "has sent {sent} of the {others} other gradients: send each in its own hook, because a gradient "
            "that waits needs memory"
        )
        t.that(sent == len(grads) - 1, message, rank=rank, sent=sent, others=len(grads) - 1)


@check("stage2", points=1, seconds=20)
def check_accumulates(student, t):
    "Micro-batches add up"
    same_shards(student, t, t.integer(3, 4), t.integer(4, 5))


@check("stage2", points=2, seconds=40)
def check_gradients_are_divided(student, t):
    "No rank keeps a whole gradient: the memory of each process"
    run, _ = same_shards(student, t, 2)
    for rank, (_, left) in enumerate(run.results):
        for i, has in enumerate(left):
            message = (
                "after backward parameter {i} still has a gradient on rank {rank}: set parameter.grad to "
                "None, zeros need memory too"
            )
            t.that(has is False, message, i=i, rank=rank)
    seed, width, world = t.integer(0, 999), 768, 3
    run = explained(
        student, scenarios.large_gradients, [{"seed": seed, "rows": 4, "width": width}] * world, IN_HOOK
    )
    for sums in run.results:
        t.that(len({total is None for total in t.items(sums, 4, "the gradients of the pieces")}) == 1, LATE)
    for i, want in enumerate(twins.sums_of_gradients(seed, 4, width)):
        what = "the sum of the gradient of piece {i} on a rank"
        got = sum(t.number(sums[i], what, i=i) for sums in run.results)
        known = {AVERAGE: world * want, TWICE: want / world}
        same(t, got, want, "the sum of gradient {i}", known, i=i, rtol=1e-2, atol=1e-4)
    weights = 4 * 4 * width**2
    message = (
        "rank {rank} holds {held:.1f} times the bytes of the weights {when}: weights 1, pieces and their "
        "gradients 1/{world} each{besides}. A whole gradient is still in memory: set parameter.grad to "
        "None, and keep no reference to it"
    )
    besides, most = ", and at most two whole gradients, 0.5", (1.5 + 1.75 / world) * weights + ROOM
    values = {"unit": weights, "world": world, "when": "when the last of 4 gradients is computed"}
    holds_at_most(t, run, "before the last gradient", most, message, **values, besides=besides)
    most, values["when"] = (1 + 2 / world) * weights + ROOM, "after backward"
    holds_at_most(t, run, "after backward", most, message, **values, besides="")


# -- parameters


NO_OUTPUT = "sharded_linear returns None: is a return missing, in it or in the function of the checkpoint?"
NOT_TRANSPOSED = "x is multiplied by the weight and not by its transpose: F.linear(x, weight) is x @ weight.T"
OLD = (
    "pass {number} uses the weight of the first pass, but the pieces have changed since: gather in each "
    "pass, and keep no whole weight"
)
NO_WAY_BACK = (
    "weight_piece gets no gradient: gather it with Gather.apply(weight_piece, shape), because autograd does "
    "not pass through whole"
)
BACKWARD = {
    "incorrect number of gradients": (
        "backward returns one value for each argument of forward after ctx: the gradient of the piece, and "
        "None for the shape"
    ),
    "'weight' (position 2) must be Tensor, not NoneType": "Gather.apply returns None: is a return missing?",
    "no attribute 'backward'": NO_OUTPUT,
    "'input' (position 1) must be Tensor, not NoneType": NO_OUTPUT,
    "does not have a grad_fn": NO_WAY_BACK,
    "shapes cannot be multiplied": NOT_TRANSPOSED,
}


def same_linear(student, t, world: int, passes: int = 1):
    """Outputs and gradients are those of the whole weight; the run, and the weight's gradient."""
    case, weights, means = twins.linear_case(t, world, passes)
    run, exact = explained(student, scenarios.linear, case, BACKWARD), {"rtol": 1e-9, "atol": 1e-12}
    for rank, (own, (outs, of_xs, _)) in enumerate(zip(case, run.results)):
        passed = zip(own["xs"], own["grads"], weights, outs, of_xs)
        for number, (x, grad, weight, out, of_x) in enumerate(passed):
            where = {"rank": rank, "world": world, "number": number + 1}
            mistakes = {} if weight.shape[0] != weight.shape[1] else {NOT_TRANSPOSED: x @ weight}
            if number:
                mistakes[OLD] = x @ weights[0].T
            what = "the output on rank {rank} of {world}, pass {number}"
            same(t, out, x @ weight.T, what, mistakes, **exact, **where)
            what = "the gradient of x on rank {rank} of {world}, pass {number}"
            t.close(of_x, grad @ weight, what, **exact, **where)
    grads = [of_piece for _, _, of_piece in run.results]
    if passes == 1:
        t.that(all(of_piece is not None for of_piece in grads), NO_WAY_BACK)
        alone = [twins.of_weight(own["xs"][0], own["grads"][0]) for own in case]
        what = "the gradients of the pieces of all ranks together (world {world})"
        same_pieces(t, grads, means[0], alone, what, {})
    return run, means, grads


@check("stage3", points=1, seconds=40)
def check_gather(student, t):
    "Gather alone: the whole of any shape, and the averaged gradient of the piece"
    world = t.integer(3, 4)

    def draw() -> list[int]:
        return [t.integer(2, 3), t.integer(2, 5), t.integer(2, 5)]

    sizes = t.draw_until(draw, lambda sizes: math.prod(sizes) % world > 0)
    value, *case = (t.normal(*sizes, dtype=torch.float64) for _ in range(1 + world))
    run = explained(student, scenarios.gathered, [{"value": value, "grad": grad} for grad in case], BACKWARD)
    what = "Gather.apply(piece, shape) of shape {shape} on rank {rank} of {world}"
    every_rank(t, run, value, what, lambda result: result[0], rtol=0, atol=0, shape=tuple(sizes))
    grads = [of_piece for _, of_piece in run.results]
    message = "the piece gets no gradient from Gather: its backward returns it, and None for the shape"
    t.that(all(of_piece is not None for of_piece in grads), message)
    what = "the gradients of the pieces of all ranks together (world {world}), from Gather alone,"
    same_pieces(t, grads, sum(case) / world, case, what, {})
    message = "{kinds} is more than Gather needs: an all-gather and a reduce-scatter"
    passes_only(t, run, [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL], message)
    message = (
        "forward and backward of Gather pass {got} bytes on rank {rank} ({kinds}): one all-gather and one "
        "reduce-scatter pass {want}"
    )
    passes_exactly(t, run, 2 * twins.padded_bytes([value], world), message, calls=2)


@check("stage3", points=3, seconds=40)
def check_linear(student, t):
    "Output and gradients are those of the whole weight"
    for world in (1, t.integer(3, 5)):
        same_linear(student, t, world)


@check("stage3", points=1, seconds=20)
def check_passes_add_up(student, t):
    "Micro-batches add up in weight_piece.grad, and each uses the weight of now"
    _run, means, grads = same_linear(student, t, t.integer(3, 4), passes=t.integer(3, 4))
    t.that(all(of_piece is not None for of_piece in grads), NO_WAY_BACK)
    total = sum(means)
    got = torch.cat([t.tensor(of_piece, "weight_piece.grad") for of_piece in grads])[: total.numel()]
    last = "After {count} passes weight_piece.grad has the last gradient: return it, and autograd adds it."
    again = (
        "After {count} passes weight_piece.grad has {count} times the first gradient: compute it each time."
    )
    known = {last: means[-1].flatten(), again: len(means) * means[0].flatten()}
    what = "the gradients of the pieces of all ranks together, after {count} passes"
    same(t, got, total.flatten(), what, known, count=len(means), rtol=1e-9, atol=1e-12)


@check("stage3", points=2, seconds=20)
def check_gathers(student, t):
    "At most two all-gathers and one reduce-scatter"
    world = t.integer(3, 4)
    run, (mean,), _ = same_linear(student, t, world)
    size = twins.padded_bytes([mean], world)
    message = "{kinds} sends more than a reduce-scatter of the gradient"
    passes_only(t, run, [Kind.ALL_GATHER, Kind.REDUCE_SCATTER], message)
    message = "rank {rank} gathered {got} bytes, but the weight has {size}: gather it at most twice"
    passes_at_most(t, run, 2 * size, message, Kind.ALL_GATHER, size=size)
    message = "rank {rank} reduce-scattered {got} bytes, but the weight has {want}: reduce it once"
    passes_exactly(t, run, size, message, Kind.REDUCE_SCATTER)
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        uses_what_arrives(t, run, kind, t.integer(0, world - 1))


@check("stage3", points=2, seconds=40)
def check_weights_are_freed(student, t):
    "A whole weight does not outlive the computation: the memory of each process"
    seed, width, world = t.integer(0, 999), 896, 3
    run = explained(student, scenarios.large_linear, [{"seed": seed, "width": width}] * world, BACKWARD)
    want, sums = twins.large_output(seed, width)
    what = "the output of three layers on rank {rank}"
    every_rank(t, run, want, what, of=lambda result: result[0], rtol=1e-3, atol=1e-4)
    for i, right in enumerate(sums):
        got = sum(t.number(own[i], "the sum of the gradient of piece {i}", i=i) for _, own in run.results)
        t.close(got, right, "the sum of the gradient of weight {i}", i=i, rtol=1e-2, atol=1e-2 * width)
    of_a_weight = 4 * width**2
    message = (
        "rank {rank} holds {held:.1f} times the bytes of a weight after forward, but its pieces of three "
        "weights have {parts:.2f}: either F.linear saves its weight for backward, because it runs outside "
        "of a checkpoint, or the whole weight is an *argument* of the checkpoint, which keeps its arguments "
        "(gather inside the function that the checkpoint runs), or your code keeps it"
    )
    most, unit = 3 / world * of_a_weight + ROOM, of_a_weight
    holds_at_most(t, run, "after forward", most, message, unit=unit, parts=3 / world)
    message = (
        "rank {rank} holds {held:.1f} times the bytes of a weight {when}, but its pieces of three weights "
        "and the gradients of {count} have {parts:.2f}: a whole weight or its gradient outlives the "
        "computation"
    )
    for mark, when, count in (
        ("before the last layer of backward", "when backward has passed two of three layers", 2),
        ("after backward", "after backward", 3),
    ):
        parts = (3 + count) / world
        values = {"unit": of_a_weight, "parts": parts, "when": when, "count": count}
        holds_at_most(t, run, mark, parts * of_a_weight + ROOM, message, **values)


# -- offload

# Each of the first is less than half the spacing of bf16, each of the second than that of fp16.
SMALL_STEPS = {"name": "AdamW", "options": {"lr": 0.002, "weight_decay": 0.1}}
SMALLER_STEPS = {"name": "SGD", "options": {"lr": 0.0003, "weight_decay": 0.01}}
LARGE_STEP = {"name": "AdamW", "options": {"lr": 0.25, "weight_decay": 0.1}}
FP32 = (
    'a master or its gradient is in 16 bits: make the master with .to("cpu", torch.float32, copy=True), and '
    "cast the gradient with .float()"
)
OFFLOADED = {
    "a gradient with dtype 'float'": (
        'the masters are in 16 bits: make them in fp32, with .to("cpu", torch.float32, copy=True)'
    ),
    "a gradient with dtype": "a master needs a gradient in fp32: cast that of the piece with .float()",
    "grad has data of a different type": FP32,
    "make_optimizer is called again": (
        "make_optimizer is called again: call it once, with the list of all masters"
    ),
    "that is no nn.Parameter": "a master is no nn.Parameter: make each one, nn.Parameter(...)",
    "make_optimizer gets a master of": (
        "a master is not in torch.float32: an update of less than half the spacing of 16-bit numbers is "
        "rounded away"
    ),
    "leaf Variable that requires grad": ("autograd refuses a change in place: write piece.data.copy_(...)"),
    "match the size": "copy_ needs two tensors of the same shape: each master goes into its own piece",
}


def same_offloaded(student, t, without: int | None = None, first: bool = False):
    """After one large step the pieces are the twin's; what the run returned, the pieces at the start, and the
    twin's pieces.

    ``first``: a step with all gradients comes before.
    """
    values, steps = twins.offload_case(t, t.integer(2, 4), without)
    if first:
        steps = [[(value - 2).sign() for value in values], *steps]
    inputs = {"values": values, "steps": steps, **LARGE_STEP}
    (got,) = explained(student, scenarios.offloaded, [inputs], OFFLOADED).results
    want = [master.bfloat16() for master in twins.unsharded(*in_fp32(values, steps), **LARGE_STEP)]
    near_enough = {"rtol": 2**-6, "atol": 0}
    if without is not None:
        message = (
            "A piece without gradient has changed: its master needs None as gradient. Zeros, or an earlier "
            "gradient, move it."
        )
        t.that(near(got[0][without], want[without], **near_enough), message)
    message = "A piece has not changed: copy the new values of its master into the piece."
    before = [want[i] if i == without else value for i, value in enumerate(values)]
    same(t, got[0], want, "piece {i} after a step", {message: before}, **near_enough)
    return got, values, want


def in_fp32(values, steps):
    """Pieces and gradients of masters."""
    of_masters = [[None if grad is None else grad.float() for grad in grads] for grads in steps]
    return [value.float() for value in values], of_masters


@check("offload", points=2)
def check_offloaded(student, t):
    "Masters in fp32 and pieces in 16 bits have the update of an unsharded optimiser"
    one_optimiser(student, t)
    for dtype, how in ((torch.bfloat16, SMALL_STEPS), (torch.float16, SMALLER_STEPS)):
        same_small_steps(
            student, t, how, *twins.offload_case(t, t.integer(3, 4), steps=t.integer(13, 16), dtype=dtype)
        )


OF_ALL_MASTERS = (
    "piece {i} is not updated by one optimiser of all masters. The optimiser of this check divides by the "
    "norm of all gradients that it has, so its updates show of what it was made"
)


def one_optimiser(student, t) -> None:
    """One optimiser of all masters updates the pieces."""
    values, steps = twins.offload_case(t, t.integer(3, 4), steps=2)
    lr = t.uniform(0.4, 0.8)
    inputs = {"values": values, "steps": steps, "lr": lr}
    (got,) = explained(student, scenarios.offloaded_together, [inputs], OFFLOADED).results
    want = [each.bfloat16() for each in twins.together(*in_fp32(values, steps), world=1, lr=lr)]
    message = "A piece has not changed: copy the new values of its master into the piece."
    near_enough = {"rtol": 2**-6, "atol": 0}
    wrong_if(t, got, want, {message: values}, **near_enough)
    same_kind = "piece {i} after two steps"
    for i, (mine, right) in enumerate(zip(t.items(got, len(want), "the pieces"), want)):
        t.tensor(mine, same_kind, shape=right.shape, dtype=right.dtype, i=i)
        t.that(near(mine, right, **near_enough), OF_ALL_MASTERS, i=i)


def same_small_steps(student, t, how: dict, values: list[Tensor], steps: list[list[Tensor | None]]) -> None:
    """After small steps, each lost in 16 bits, the pieces are the rounded masters of the twin."""
    dtype = values[0].dtype
    inputs, count = {"values": values, "steps": steps, **how}, len(steps)
    ((pieces, *_),) = explained(student, scenarios.offloaded, [inputs], OFFLOADED).results
    lost = (
        "After {count} steps the pieces are those of masters that are read back from the rounded pieces, or "
        "that are in 16 bits, so small updates are lost: make the masters once, in __init__, in fp32, and "
        "only write into the pieces"
    )
    masters = twins.unsharded(*in_fp32(values, steps), **how)
    want = [master.to(dtype) for master in masters]
    before = [master.to(dtype) for master in twins.read_back(values, steps, **how)]
    wrong_if(t, pieces, want, {lost: before}, rtol=0, atol=0, count=count)
    what = "piece {i} after {count} steps, rounded to 16 bits"
    for i, (mine, master) in enumerate(zip(t.items(pieces, len(want), "the pieces"), masters)):
        mine = t.tensor(mine, what, shape=master.shape, dtype=dtype, i=i, count=count)
        least, most = ((master + by).to(dtype) for by in (-2e-6, 2e-6))  # between them if both round alike
        right = torch.where((least <= mine) & (mine <= most), mine, want[i])
        t.close(mine, right, what, rtol=0, atol=0, i=i, count=count)


@check("offload", points=1)
def check_pieces_in_place(student, t):
    "The pieces are changed in place"
    (_, memory, _), values, want = same_offloaded(student, t)
    message = "A piece has new memory, and the old one still has the old values. Use piece.data.copy_(...)."
    same(t, memory, want, "the memory of piece {i} after a step", {message: values}, rtol=2**-6, atol=0)


@check("offload", points=1)
def check_no_gradient_left(student, t):
    "After the step no gradient is left"
    (_, _, left), _, _ = same_offloaded(student, t)
    t.that(
        left is False,
        "After the step a piece still has a gradient, which needs memory. Set piece.grad to None",
    )
    inputs = {"seed": t.integer(0, 999), "numel": 2 * MIB}
    run = explained(student, scenarios.large_offloaded, [inputs], OFFLOADED)
    want = twins.large_offloaded(**inputs)
    same(t, run.results[0], want, "some numbers of the large piece {i} after a step", rtol=2**-6, atol=2**-9)
    message = (
        "After the step the process holds {held:.0f} MiB, but two pieces in 16 bits and their masters in "
        "fp32 have 24: a master still has a gradient, which needs memory. Set master.grad to None"
    )
    holds_at_most(t, run, "after the step", 24 * MIB + ROOM, message)


@check("offload", points=1)
def check_piece_without_gradient(student, t):
    "A piece without gradient does not change"
    same_offloaded(student, t, without=t.integer(0, 1))
    same_offloaded(student, t, without=t.integer(0, 1), first=True)

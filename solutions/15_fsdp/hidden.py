"""The hidden checks: cases of other kinds, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.contract import Kind, check
from dlo_lib.grading.quiz import Answer, quiz_right

from .checks import flat_case, same_pack, same_padding, same_units, same_unpack
from .gathering import MIB, copies_of, reduce_run
from .quiz import QUIZ
from .scenarios import freed, from_flat, kept_for_backward, large_reduced, layers_in_order, trained
from .training import TINY, batch_of, layers_case, same_llama, state_run, train_run, whole_state_of
from .twins import layered, llama, packed_bytes, packed_row, rounded_step, rows_of


@check("flat", points=1, seconds=20)
def check_flat_few(student, t):
    "Fewer numbers than ranks"
    tensors = [t.normal(1)[0], t.normal(t.integer(1, 2))]
    for got in student.ranks(from_flat, flat_case(tensors, 4)).results:
        for mine, want in zip(t.items(got, 2, "the tensors"), tensors):
            good = type(mine) is torch.Tensor and mine.shape == want.shape and bool(torch.equal(mine, want))
            t.that(good, "Tensors with fewer numbers than there are ranks, or without dimensions, do not come back.")


@check("padding", points=1)
def check_padding_of_scalars(student, t):
    "Tensors without dimensions, and fewer rows than ranks"
    shapes = [torch.Size(()), torch.Size((t.integer(1, 2), t.integer(2, 5))), torch.Size((t.integer(3, 9),))]
    same_padding(student, t, shapes, 4, "A tensor without dimensions is one row of one number.")


@check("rows", points=1)
def check_ranks_without_rows(student, t):
    "A rank without rows"
    length = t.integer(2, 3)
    for rank in range(7):
        start, stop = t.items(student.own_rows(length, rank, 7), 2, "own_rows")
        want = (rank, rank + 1) if rank < length else (length, length)
        good = type(start) is int and type(stop) is int and (start, stop) == want
        t.that(good, "Where there are fewer rows than ranks, a rank without rows has (length, length).")
    tensors = [t.normal(length, 2), t.normal(1)[0]]
    for rank in range(7):
        views = student.shard_views(packed_row(tensors, rank, 7), [tensor.shape for tensor in tensors], rank, 7)
        for mine, tensor in zip(t.items(views, 2, "the views"), tensors):
            t.close(mine, rows_of(tensor, rank, 7), "the part of a rank of 7", atol=0, rtol=0)


@check("pack", points=1)
def check_odd_shapes(student, t):
    "Other dtypes, tensors without dimensions, fewer rows than ranks"
    tensors = [
        t.normal(1, dtype=torch.bfloat16)[0],
        t.normal(2, 3, 2, dtype=torch.bfloat16),
        t.normal(t.integer(1, 4), dtype=torch.bfloat16),
    ]
    for tensor in tensors:
        same_pack(student, t, [tensor], 5)
        same_unpack(student, t, [tensor], 5)


@check("unshard", points=2, seconds=20)
def check_same_tensors(student, t):
    "Backward finds the weights that forward has used"
    weight = t.normal(2 * t.integer(1, 3), t.integer(2, 4))
    xs = [t.normal(3, len(weight)) for _ in range(2)]
    for x, got in zip(xs, student.ranks(kept_for_backward, [{"weight": weight, "x": x} for x in xs]).results):
        of_x, of_weight = t.items(got, 2, "the gradients")
        inner = 1 - torch.tanh(x @ weight).square()
        t.close(of_x, inner @ weight.T, "the gradient of the input, of a unit that was freed and gathered again", rtol=1e-3, atol=1e-5)
        t.close(of_weight, x.T @ inner, "the gradient of the whole weight", rtol=1e-3, atol=1e-5)


@check("reshard", points=1, seconds=20)
def check_row_untouched(student, t):
    "The row stays as it was, in its own precision"
    tensors = copies_of(t, 1)[0]
    for rank, got in enumerate(student.ranks(freed, [{"tensors": tensors, "compute": "bfloat16"}] * 2).results):
        _, row, _ = t.items(got, 3, "parameters, row and shapes")
        good = type(row) is torch.Tensor and bool(torch.equal(row, packed_row(tensors, rank, 2)))
        t.that(good, "After unshard and reshard a rank's row is not what it was: with bf16 it would be rounded again and again.")


@check("reduce", points=1, seconds=20)
def check_frozen_and_unused(student, t):
    "Frozen parameters send nothing, unused ones zeros"
    run, shapes = reduce_run(student, t, 2, frozen=(t.integer(0, 1),), missing=(2,))
    want = packed_bytes(shapes, 2, 4)
    t.that(all(run.bytes(rank) == want for rank in range(2)), "The gradients of trained parameters should be sent, and no others.")


@check("reduce", points=1, seconds=20)
def check_reduce_dtype(student, t):
    "bf16 gradients are summed in fp32 if that is asked for"
    run, shapes = reduce_run(student, t, 4, dtypes=("bfloat16", "float32"))
    want = packed_bytes(shapes, 4, 4)
    t.that(all(run.bytes(rank) == want for rank in range(4)), "With fp32 as reduce_dtype the message is in fp32.")


@check("reduce", points=2, seconds=30)
def check_gradients_freed(student, t):
    "No whole gradient is left"
    seed, width = t.integer(0, 999), 2048
    run = student.ranks(large_reduced, [{"seed": seed, "width": width}] * 2)
    random = torch.Generator().manual_seed(seed)
    whole = float(torch.randn(width, width, generator=random).double().sum())
    t.close(sum(run.results), whole, "the sum of the gradients of all shards", rtol=1e-3, atol=1e-2)
    own = 2 * 4 * width**2 / 2  # the row and its gradient
    for rank in range(2):
        t.that(run.memory(rank, "after reduce") < own + 6 * MIB, "After reduce_gradients a rank still holds a whole gradient.")


@check("units", points=1, seconds=20)
def check_across_blocks(student, t):
    "Parameters that are tied across blocks, or to the head"
    name = t.choice(["self_attn.q_proj.weight", "mlp.up_proj.weight"])
    message = "A parameter used by two blocks, or inside and outside of one, belongs to the root"
    same_units(student, t, [[f"layers.0.{name}", f"layers.1.{name}"]], "Block", False, message)
    same_units(student, t, [["norm.weight", "layers.1.input_layernorm.weight"]], "Block", False, message)


@check("hooks", points=2, seconds=40)
def check_inference(student, t):
    "Without gradients every unit is freed, and the next forward sees new weights"
    first, weights, xs = layers_case(t, 2, 2)
    factor = t.uniform(1.2, 1.6)
    fixed = {"first": first, "weights": weights, "compute": None, "reduce": None, "times": 2, "factor": factor}
    results = student.ranks(layers_in_order, [{**fixed, "x": x} for x in xs]).results
    for times in (1, 2):
        want, _ = layered(first * factor**times, [weight * factor**times for weight in weights], xs)
        for right, (got, _) in zip(want, results):
            t.close(t.items(got, 2, "the outputs")[times - 1], right, "the output without gradients, after weights have changed", rtol=1e-9)


@check("hooks", points=1, seconds=40)
def check_frozen_first(student, t):
    "A frozen embedding and a frozen block before trained ones"
    frozen = [name for name in llama({**TINY, "num_layers": 2}, device="meta").state_dict() if name.startswith(("embed", "lm_head"))]
    same_llama(student, t, 2, frozen[:1] if t.integer(0, 1) else [*frozen[:1], "layers.0.mlp.up_proj.weight"], batches=2)


@check("hooks", points=1, seconds=40)
def check_mixed_precision(student, t):
    "Computed in bf16, reduced in fp32"
    first, weights, xs = layers_case(t, 2, 2, torch.float32)
    fixed = {"first": first, "weights": weights, "compute": "bfloat16", "reduce": "float32", "times": 1, "factor": None}
    run = student.ranks(layers_in_order, [{**fixed, "x": x} for x in xs])
    outputs, grads = layered(first, weights, xs, torch.bfloat16)
    for rank, (got, shards) in enumerate(run.results):
        t.close(t.items(got, 1, "the outputs")[0], outputs[rank], "the output in bf16", rtol=3e-2, atol=3e-2)
        for mine, right in zip(t.items(shards, 3, "the gradients"), grads):
            t.close(mine, rows_of(right, rank, 2), "a gradient, in the dtype of its shard", rtol=3e-2, atol=3e-3)
    sizes = [packed_bytes([tensor.shape], 2, 2) for tensor in (first, *weights)]
    good = all(call.payload_bytes in sizes for rank in range(2) for call in run.calls(rank, Kind.ALL_GATHER))
    t.that(good, "With bf16, gathers have half the bytes of fp32.")


@check("state", points=1, seconds=30)
def check_tied_and_buffers(student, t):
    "Tied parameters under all their names, and buffers"
    state_run(student, t, 2, tied=True, buffer=t.normal(3))


@check("state", points=1, seconds=30)
def check_unit_by_unit(student, t):
    "One unit at a time"
    run, sizes = state_run(student, t, 2)
    model = llama(sizes, device="meta")
    blocks = [[parameter.shape for parameter in block.parameters()] for block in model.layers]
    root = [parameter.shape for name, parameter in model.named_parameters() if not name.startswith("layers.")]
    most = max(packed_bytes(unit, 2, 4) for unit in [root, *blocks])
    t.that(all(run.max_unsharded(rank) <= most for rank in range(2)), "full_state gathers everything at once: unit by unit is the point.")


@check("train", points=2, seconds=60)
def check_micro_batches(student, t):
    "Micro-batches with unequal numbers of targets"
    own = [[[batch_of(t, TINY, 2, 4, 5), batch_of(t, TINY, 2, 4, 0)]] for _ in range(2)]
    train_run(student, t, own, [], tied=False)


@check("train", points=2, seconds=40)
def check_masters(student, t):
    "With mixed precision small updates are kept"
    state, lr = whole_state_of(t, TINY, torch.float32), 1e-4
    batches = [batch_of(t, TINY, 2, 4, t.integer(0, 2)) for _ in range(2)]
    fixed = {"sizes": TINY, "state": state, "frozen": [], "lr": lr, "dtype": "float32", "compute": "bfloat16", "reduce": "float32"}
    run = student.ranks(trained, [{**fixed, "steps": [[batch]]} for batch in batches])
    want = rounded_step(TINY, state, batches, lr)
    for rank, (_, shards) in enumerate(run.results):
        off = []
        for name, value in want.items():
            rows = rows_of(value, rank, 2)
            mine = t.tensor(shards.get(name), "a parameter in the end", shape=rows.shape, dtype=rows.dtype)
            off.append((mine - rows).abs().flatten())
        t.that(
            bool(torch.cat(off).mean() < 0.1 * lr),
            "After a step in mixed precision the fp32 parameters are not where one process would have them.",
        )


# -- quiz

ANSWERS = {
    "q1": Answer("b", "16 bytes x 2 billion / 8; after backward no block is whole"),
    "q2": Answer("d", "a row of a matrix stays whole, and each parameter its own"),
    "q3": Answer("a", "the other rows of the average are of no use to this rank"),
    "q4": Answer("c", "B_p f bytes are saved, and the memory is that of the whole model"),
    "q5": Answer("b", "1 + 0.001 is 1 in bf16"),
    "q6": Answer("a", "all ranks must gather the same units in the same order"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)

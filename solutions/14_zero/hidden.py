"""The hidden checks: cases of other kinds, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.contract import check, scenario
from dlo_lib.grading.quiz import Answer, quiz_right
from dlo_lib.grading.twins import twin

from .checks import pieces, same_state
from .on_ranks import MIB, same_parameters
from .quiz import QUIZ
from .scenarios import made_whole, norms
from .twins import norm_case, whole_case


@check("state", points=1, seconds=30)
def check_momentum(student, t):
    "Another optimiser"
    same_state(student, t, 1, ("optimizer",), "SGD with momentum keeps one number for each parameter.", "sgd-momentum", 1)


@check("pieces", points=1, seconds=20)
def check_few_numbers(student, t):
    "A tensor smaller than the number of ranks"
    tensor, case = whole_case(t, (t.integer(2, 3),), 4)
    for got in student.ranks(made_whole, case).results:
        t.that(bool(torch.equal(got, tensor)), "A tensor with fewer numbers than ranks does not come back whole.")


@check("pieces", points=1)
def check_scalar(student, t):
    "A tensor without dimensions"
    tensor = t.normal(1)[0]
    got = torch.stack(pieces(student, t, tensor, 3)).flatten()
    t.that(bool(got[0] == tensor) and not got[1:].any(), "A single number without dimensions has a first piece that holds it, and zeros.")


@check("stage1", points=1, seconds=20)
def check_other_optimizer(student, t):
    "Another optimiser than AdamW"
    same_parameters(student, t, 2, {"name": "SGD", "options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}})


@check("stage1", points=1, seconds=20)
def check_missing_gradient(student, t):
    "A parameter without gradient is left alone"
    same_parameters(student, t, 2, {"name": "AdamW", "options": {"lr": 0.05, "weight_decay": 0.1}}, without=t.integer(0, 2))


@check("norm", points=1, seconds=20)
def check_empty_pieces(student, t):
    "A rank whose pieces are empty"
    case, want = norm_case(t, t.shuffled([[0, 0], [t.integer(2, 9), 0]]))
    for got in student.ranks(norms, case).results:
        number = t.tensor(got, "the norm where one rank has empty pieces").flatten().to(want.dtype)
        t.close(number, want[None], "the norm where one rank has empty pieces", rtol=1e-5)


@scenario
def large_gradients(student, rank, world, seed, rows, width):
    """Memory after backward of two large layers; sums of the gradients of the pieces."""
    random = torch.Generator().manual_seed(seed)
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(width, width, generator=random) / width**0.5) for _ in range(2)])
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in module]
    student.shard_gradients(module, pieces)
    x = torch.randn(rows, width, generator=random)
    torch.tanh(torch.tanh(x @ module[0]) @ module[1]).square().mean().backward()
    mark("after backward")  # noqa: F821
    return [piece.grad.sum().item() for piece in pieces]


@twin
def sums_of_gradients(seed: int, rows: int, width: int) -> list[float]:
    """Of whole gradients, in one process; all ranks have the same input."""
    random = torch.Generator().manual_seed(seed)
    weights = [(torch.randn(width, width, generator=random) / width**0.5).requires_grad_() for _ in range(2)]
    x = torch.randn(rows, width, generator=random)
    torch.tanh(torch.tanh(x @ weights[0]) @ weights[1]).square().mean().backward()
    return [weight.grad.sum().item() for weight in weights]


@check("stage2", points=2, seconds=40)
def check_gradients_are_divided(student, t):
    "No rank keeps a whole gradient"
    seed, width = t.integer(0, 999), 1448
    run = student.ranks(large_gradients, [{"seed": seed, "rows": 4, "width": width}] * 2)
    for i, want in enumerate(sums_of_gradients(seed, 4, width)):
        t.close(sum(got[i] for got in run.results), want, "the sum of gradient {i}", i=i, rtol=1e-2, atol=1e-4)
    both = 2 * 4 * width**2
    for rank in range(2):
        held = run.memory(rank, "after backward")
        t.that(
            held < 2.5 * both,
            "After backward a rank holds whole gradients: with weights, pieces and their gradients it would hold half as much.",
        )


@scenario
def large_linear(student, rank, world, seed, width):
    """Memory after forward of three large layers of which this rank has pieces."""
    random = torch.Generator().manual_seed(seed)
    weights = (torch.randn(width, width, generator=random) / width**0.5 for _ in range(3))
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in weights]
    x = torch.randn(2, width, generator=random)
    for piece in pieces:
        x = torch.tanh(student.sharded_linear(x, piece, (width, width)))
    mark("after forward")  # noqa: F821
    x.sum().backward()
    return x.detach()


@twin
def large_output(seed: int, width: int) -> torch.Tensor:
    """In one process."""
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(width, width, generator=random) / width**0.5 for _ in range(3)]
    x = torch.randn(2, width, generator=random)
    for weight in weights:
        x = torch.tanh(x @ weight.T)
    return x


@check("stage3", points=2, seconds=40)
def check_weights_are_freed(student, t):
    "After forward no rank holds a whole weight"
    seed, width = t.integer(0, 999), 1448
    run = student.ranks(large_linear, [{"seed": seed, "width": width}] * 4)
    want = large_output(seed, width)
    for rank, got in enumerate(run.results):
        t.close(got, want, "the output of three layers on rank {rank}", rank=rank, rtol=1e-3, atol=1e-4)
    for rank in range(4):
        held = run.memory(rank, "after forward") / (4 * width**2)
        t.that(held < 2, "After forward a rank holds whole weights: autograd keeps what F.linear has used, unless a checkpoint forgets it.")


@scenario
def refused(student, rank, world, configs):
    """Which of ``configs`` raise ValueError."""
    found = []
    for config, ranks in configs:
        try:
            student.settings(config, ranks)
            found.append(False)
        except ValueError:
            found.append(True)
    return found


@check("settings", points=1, seconds=20)
def check_contradictions(student, t):
    "Contradictions are refused"
    world, batch, steps = t.integer(2, 4), t.integer(2, 5), t.integer(2, 4)
    total, one, often = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    product = world * batch * steps
    configs = [
        ({total: product, one: batch, often: steps}, world),
        ({total: product + world, one: batch, often: steps}, world),
        ({total: product + 1, one: batch}, world),
        ({total: product + 1, often: steps}, world),
        ({total: world - 1}, world),
    ]
    (got,) = student.ranks(refused, [{"configs": configs}]).results
    want = [False, True, True, True, True]
    t.that(got == want, "train_batch_size must be the product of the other two and the ranks: ValueError otherwise, and only then.")


@check("settings", points=1)
def check_other_settings(student, t):
    "Buckets, clipping and offload, given and missing"
    elements, clip = t.integer(1, 9) * 10**6, t.uniform(0.1, 2.0)
    zero = {"stage": 2, "reduce_bucket_size": float(elements), "offload_optimizer": {"device": "cpu"}}
    full = {"train_batch_size": 8, "gradient_clipping": clip, "zero_optimization": zero}
    off = {"train_batch_size": 8, "gradient_clipping": 0, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}
    for config, want in (
        (full, {"bucket_bytes": 4 * elements, "max_norm": clip, "state_device": "cpu", "parallel": "zero2"}),
        (off, {"bucket_bytes": 4 * 5 * 10**8, "max_norm": None, "state_device": None, "parallel": "zero1"}),
        ({"train_batch_size": 8}, {"bucket_bytes": 4 * 5 * 10**8, "max_norm": None, "state_device": None, "parallel": "ddp"}),
    ):
        got = student.settings(config, 2)
        t.that(type(got) is dict, "settings should give a dict")
        for name, value in want.items():
            given = got.get(name)
            good = given is None if value is None else type(given) in (int, float, str) and given == value
            t.that(bool(good), "A setting is not what the configuration says, or not the default where it says nothing.")


# -- quiz

ANSWERS = {
    "q1": Answer("c", "stage 3 gathers the weights twice: 3 B f against DDP's 2 B f; stage 2 only puts the step between the two halves"),
    "q2": Answer("a", "4 + 12 / 8 bytes"),
    "q3": Answer("d", "squares of pieces add up, and the sum over all ranks is one all-reduce of one number"),
    "q4": Answer("b", "ZeRO stays data parallelism: every rank computes every layer"),
    "q5": Answer("c", "the moments stay where the update is computed"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)

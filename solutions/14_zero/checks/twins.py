"""The references of the checks (a measured training step, one process with an unsharded optimiser) and their cases."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin
from dlo_lib.models import LlamaConfig
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part, measure_memory

STAGES = ("ddp", "zero1", "zero2", "zero3")


@twin
def measured_state(config: LlamaConfig, world: int, stage: int, optimizer: str) -> dict[str, int]:
    """The bytes of each part on a rank after backward, in a measured step."""
    report = measure_memory(config, 1, 32, optimizer=optimizer, parallel=STAGES[stage], world_size=world)
    parts = {"weights": Part.WEIGHTS, "gradients": Part.GRADIENTS, "optimizer": Part.OPTIMIZER_STATE}
    end = max(index for index, event in enumerate(report.events) if event.phase is Phase.BACKWARD)
    return {name: int(report.timeline[part][end]) for name, part in parts.items()}


def whole_case(t, shape: tuple[int, ...], world: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[dict]]:
    """A tensor, and the piece of each rank."""
    tensor = t.normal(*shape, dtype=dtype)
    size = -(-tensor.numel() // world)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, size * world - tensor.numel()))
    return tensor, [{"piece": piece.clone(), "shape": list(shape)} for piece in padded.split(size)]


@twin
def unsharded(weights: list[Tensor], steps: list[list[Tensor | None]], name: str, options: dict) -> list[Tensor]:
    """The same in one process."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = getattr(torch.optim, name)(parameters, **options)
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@twin
def without_memory(weights: list[Tensor], steps: list[list[Tensor | None]], name: str, options: dict) -> list[Tensor]:
    """The same with a new optimiser in each step."""
    for grads in steps:
        weights = unsharded(weights, [grads], name, options)
    return [weight.detach() for weight in weights]


def pieces_added(grad: Tensor, world: int) -> Tensor:
    """A gradient of which each piece is the sum of the pieces of all ranks."""
    size = -(-grad.numel() // world)
    padded = torch.nn.functional.pad(grad.flatten(), (0, size * world - grad.numel()))
    return padded.view(world, size).sum(0).repeat(world)[: grad.numel()].view_as(grad)


ADAMW = {"name": "AdamW", "options": {"lr": 0.05, "weight_decay": 0.1}}


def steps_case(
    t, without: int | None = None, sizes: list[tuple[int, int]] | None = None, missing: tuple[int, ...] = (0, 1, 2)
) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Weights of odd sizes and the gradients of three steps; ``without``: a parameter without gradient in the steps ``missing``."""
    shapes = sizes or [(t.integer(2, 6), t.integer(2, 6)) for _ in range(3)]
    weights = [t.normal(*shape, dtype=torch.float64) for shape in shapes]
    steps: list[list[Tensor | None]] = [[t.normal(*weight.shape, dtype=torch.float64) for weight in weights] for _ in range(3)]
    for step in missing if without is not None else ():
        steps[step][without] = None
    return weights, steps


@twin
def large_state(seed: int, numel: int, world: int) -> list[Tensor]:
    """The same in one process."""
    random = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(numel // world, generator=random)) for _ in range(world)]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, foreach=False)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(numel // world, generator=random)
        optimizer.step()
    return [parameter.detach()[:: numel // 64].clone() for parameter in parameters]


def norm_case(t, sizes: list[list[int]]) -> tuple[list[dict], Tensor]:
    """Pieces of each rank, and the norm of them all."""
    parts = [[t.normal(size) * (1 + rank) for size in own] for rank, own in enumerate(sizes)]
    return [{"grads": own} for own in parts], torch.cat([piece for own in parts for piece in own]).norm()


@twin
def whole_gradients(weights: list[Tensor], batches: list[list[Tensor]]) -> list[Tensor]:
    """One process: the mean over ranks of the sum over their batches."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    loss = torch.zeros((), dtype=torch.float64)
    for x in itertools.chain(*batches):
        for weight in weights:
            x = torch.tanh(x @ weight)
        loss = loss + x.square().mean() / len(batches)
    return list(torch.autograd.grad(loss, weights))


@twin
def sums_of_gradients(seed: int, rows: int, width: int) -> list[float]:
    """Of whole gradients, in one process; all ranks have the same input."""
    random = torch.Generator().manual_seed(seed)
    weights = [(torch.randn(width, width, generator=random) / width**0.5).requires_grad_() for _ in range(2)]
    x = torch.randn(rows, width, generator=random)
    torch.tanh(torch.tanh(x @ weights[0]) @ weights[1]).square().mean().backward()
    return [weight.grad.sum().item() for weight in weights]


@twin
def large_output(seed: int, width: int) -> Tensor:
    """In one process."""
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(width, width, generator=random) / width**0.5 for _ in range(3)]
    x = torch.randn(2, width, generator=random)
    for weight in weights:
        x = torch.tanh(x @ weight.T)
    return x


def linear_case(t, world: int) -> tuple[list[dict], Tensor]:
    """Input and gradient of each rank, and the averaged gradient of the weight."""
    shape = (t.choice([5, 7]), t.choice([5, 7]))  # two and three ranks need padding
    weight = t.normal(*shape, dtype=torch.float64)
    case = [{"x": t.normal(4, shape[1], dtype=torch.float64), "grad": t.normal(4, shape[0], dtype=torch.float64)} for _ in range(world)]
    mean = sum(own["grad"].T @ own["x"] for own in case) / world
    return [{**own, "weight": weight} for own in case], mean


@twin
def read_back(values: list[Tensor], steps: list[list[Tensor]], name: str, options: dict) -> list[Tensor]:
    """Masters that are copied from the rounded pieces before each step."""
    masters = [torch.nn.Parameter(value.float()) for value in values]
    optimizer = getattr(torch.optim, name)(masters, **options)
    for grads in steps:
        for master, grad in zip(masters, grads):
            master.data.copy_(master.data.bfloat16())
            master.grad = grad.float()
        optimizer.step()
    return [master.detach() for master in masters]


def offload_case(t, without: int | None = None, steps: int = 12) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Pieces in bf16, between 1 and 2, and gradients that keep their sign; ``without``: a piece without gradients."""
    values = [(1.5 + t.normal(t.integer(4, 9)).clamp(-2, 2) / 5).bfloat16() for _ in range(2)]
    signs = [t.normal(len(value)).sign() for value in values]
    grads = [
        [None if i == without else (sign * (1 + t.normal(len(sign)).abs() / 10)).bfloat16() for i, sign in enumerate(signs)]
        for _ in range(steps)
    ]
    return values, grads

"""The references of the checks (a measured training step, one process with an unsharded optimiser) and their
cases."""

from __future__ import annotations

import itertools
import math

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


def whole_case(tensor: Tensor, world: int) -> tuple[Tensor, list[dict]]:
    """The tensor, and the piece of each rank."""
    size = -(-tensor.numel() // world)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, size * world - tensor.numel()))
    return tensor, [{"piece": piece.clone(), "shape": list(tensor.shape)} for piece in padded.split(size)]


def padded_bytes(tensors: list[Tensor], world: int) -> int:
    """Bytes of the padded pieces of all ranks, in fp64."""
    return sum(8 * world * -(-tensor.numel() // world) for tensor in tensors)


@twin
def unsharded(
    weights: list[Tensor], steps: list[list[Tensor | None]], name: str, options: dict
) -> list[Tensor]:
    """The same in one process."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = getattr(torch.optim, name)(parameters, **options)
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@twin
def without_memory(
    weights: list[Tensor], steps: list[list[Tensor | None]], name: str, options: dict
) -> list[Tensor]:
    """The same with a new optimiser in each step."""
    for grads in steps:
        weights = unsharded(weights, [grads], name, options)
    return [weight.detach() for weight in weights]


def pieces_added(grad: Tensor, world: int) -> Tensor:
    """A gradient of which each piece is the sum of the pieces of all ranks."""
    size = -(-grad.numel() // world)
    padded = torch.nn.functional.pad(grad.flatten(), (0, size * world - grad.numel()))
    return padded.view(world, size).sum(0).repeat(world)[: grad.numel()].view_as(grad)


# a small eps: the scale of gradients does not matter
ADAMW = {"name": "AdamW", "options": {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-15}}


def shapes_of_parameters(t, world: int, count: int = 3) -> list[tuple[int, ...]]:
    """Shapes of one to three dimensions, of which every rank has a piece that is not all padding."""

    def draw(dimensions: int) -> tuple[int, ...]:
        return tuple(t.integer(2, 20 if dimensions == 1 else 6) for _ in range(dimensions))

    return [
        t.draw_until(lambda i=i: draw(1 + i % 3), lambda shape: math.prod(shape) > (world - 1) ** 2)
        for i in range(1, count + 1)
    ]


def steps_case(
    t,
    shapes: list[tuple[int, ...]],
    count: int = 3,
    without: int | None = None,
    missing: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Weights, and the gradients of ``count`` steps; ``without``: a parameter without gradient in the steps
    ``missing``, by default in all."""
    weights = [t.normal(*shape, dtype=dtype) for shape in shapes]
    steps: list[list[Tensor | None]] = [
        [t.normal(*weight.shape, dtype=dtype) for weight in weights] for _ in range(count)
    ]
    for step in (range(count) if missing is None else missing) if without is not None else ():
        steps[step][without] = None
    return weights, steps


def of_rank(tensor: Tensor, rank: int, world: int) -> Tensor:
    """The tensor with NaN outside of the piece of ``rank``."""
    size = -(-tensor.numel() // world)
    mine = torch.arange(tensor.numel()).div(size, rounding_mode="floor") == rank
    return tensor.where(mine.view_as(tensor), torch.nan)


@twin
def together(weights: list[Tensor], steps: list[list[Tensor]], world: int, lr: float) -> list[Tensor]:
    """The parameters if each of ``world`` ranks has one optimiser ``Together`` of its pieces."""
    sizes = [-(-weight.numel() // world) for weight in weights]
    owners = [torch.arange(weight.numel()) // size for weight, size in zip(weights, sizes)]
    found = [weight.flatten().clone() for weight in weights]
    moments = [torch.zeros_like(weight) for weight in found]
    for grads in steps:
        flat = [grad.flatten() for grad in grads]
        for rank in range(world):
            squares = (grad[own == rank].double().square().sum() for grad, own in zip(flat, owners))
            norm = torch.stack(list(squares)).sum().sqrt()
            for weight, grad, moment, own in zip(found, flat, moments, owners):
                mine = own == rank
                moment[mine] = 0.9 * moment[mine] + grad[mine] / norm.to(grad.dtype)
                weight[mine] -= lr * moment[mine]
    return [own.view_as(weight) for own, weight in zip(found, weights)]


@twin
def large_offloaded(seed: int, numel: int) -> list[Tensor]:
    """The pieces after a step of SGD in fp32."""
    random = torch.Generator().manual_seed(seed)
    pieces = [torch.rand(numel, generator=random).bfloat16() for _ in range(2)]
    grads = [torch.rand(numel, generator=random).sub_(0.5).bfloat16() for _ in range(2)]
    stepped = (piece.float() - 0.5 * grad.float() for piece, grad in zip(pieces, grads))
    return [piece.bfloat16()[:: numel // 64].clone() for piece in stepped]


@twin
def large_state(seed: int, numel: int, world: int) -> list[Tensor]:
    """The same in one process."""
    random = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.rand(numel // world, generator=random)) for _ in range(world)]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, amsgrad=True, foreach=False)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.rand(numel // world, generator=random).sub_(0.5)
        optimizer.step()
    return [parameter.detach()[:: numel // 64].clone() for parameter in parameters]


def norm_case(t, sizes: list[list[int]], dtype: torch.dtype = torch.float32) -> tuple[list[dict], Tensor]:
    """Pieces of each rank, and the norm of them all."""
    parts = [[t.normal(size, dtype=dtype) * (1 + rank) for size in own] for rank, own in enumerate(sizes)]
    return [{"grads": own} for own in parts], torch.cat([piece for own in parts for piece in own]).norm()


@twin
def whole_gradients(weights: list[Tensor], batches: list[list[Tensor]]) -> list[Tensor]:
    """One process: the mean over ranks of the sum over their batches."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    loss = torch.zeros((), dtype=torch.float64)
    for x in itertools.chain(*batches):
        for weight in weights:
            x = torch.tanh(x @ weight) if weight.dim() == 2 else x + weight
        loss = loss + x.square().mean() / len(batches)
    return list(torch.autograd.grad(loss, weights))


@twin
def sums_of_gradients(seed: int, rows: int, width: int) -> list[float]:
    """Of whole gradients, in one process; all ranks have the same input."""
    random = torch.Generator().manual_seed(seed)
    weights = [
        (3.5 * (torch.rand(width, width, generator=random) - 0.5) / width**0.5).requires_grad_()
        for _ in range(4)
    ]
    x = torch.randn(rows, width, generator=random)
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.square().mean().backward()
    return [weight.grad.sum().item() for weight in weights]


@twin
def large_output(seed: int, width: int) -> tuple[Tensor, list[float]]:
    """In one process: the output, and the sums of the gradients."""
    random = torch.Generator().manual_seed(seed)
    weights = [
        (3.5 * (torch.rand(width, width, generator=random) - 0.5) / width**0.5).requires_grad_()
        for _ in range(3)
    ]
    x = torch.randn(2, width, generator=random)
    for weight in weights:
        x = torch.tanh(x @ weight.T)
    grads = torch.autograd.grad(x.sum(), weights)
    return x.detach(), [float(grad.sum()) for grad in grads]


def linear_case(t, world: int, passes: int = 1) -> tuple[list[dict], list[Tensor], list[Tensor]]:
    """Inputs and gradients of each rank, in every second pass of three dimensions; the weight and the
    averaged gradient of each pass."""
    shape = (t.choice([7, 11]), t.choice([7, 11]))  # two to five ranks need padding
    first, later = drawn(t, *shape), [drawn(t, *shape) for _ in range(passes - 1)]
    weights = list(itertools.accumulate([first, *later]))
    batch = [(4,) if number % 2 == world % 2 else (2, 3) for number in range(passes)]
    case = [
        {
            "xs": [drawn(t, *sizes, shape[1]) for sizes in batch],
            "grads": [drawn(t, *sizes, shape[0]) for sizes in batch],
        }
        for _ in range(world)
    ]
    means = [
        sum(of_weight(own["xs"][number], own["grads"][number]) for own in case) / world
        for number in range(passes)
    ]
    return [{**own, "weight": first, "later": later} for own in case], weights, means


def drawn(t, *shape: int) -> Tensor:
    """In fp64."""
    return t.normal(*shape, dtype=torch.float64)


def of_weight(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the weight of a linear layer."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


@twin
def read_back(values: list[Tensor], steps: list[list[Tensor]], name: str, options: dict) -> list[Tensor]:
    """Masters that are copied from the rounded pieces before each step."""
    masters = [torch.nn.Parameter(value.float()) for value in values]
    optimizer = getattr(torch.optim, name)(masters, **options)
    for grads in steps:
        for master, grad, value in zip(masters, grads, values):
            master.data.copy_(master.data.to(value.dtype))
            master.grad = grad.float()
        optimizer.step()
    return [master.detach() for master in masters]


def offload_case(
    t, count: int, without: int | None = None, steps: int = 1, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """``count`` pieces between 1 and 2, and gradients that keep their sign; ``without``: a piece without
    gradients."""
    values = [(1.5 + t.normal(t.integer(4, 9)).clamp(-2, 2) / 5).to(dtype) for _ in range(count)]
    signs = [t.normal(len(value)).sign() for value in values]
    grads = [
        [
            None if i == without else (sign * (1 + t.normal(len(sign)).abs() / 10)).to(dtype)
            for i, sign in enumerate(signs)
        ]
        for _ in range(steps)
    ]
    return values, grads

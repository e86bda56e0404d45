"""The references of the checks: one process with the whole model, and ``torch.chunk`` for the rows of each
rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.checks.runs import KEPT_NUMBERS
from dlo_lib.grading.checks.twins import twin
from dlo_lib.models.llama import Llama, LlamaConfig

Batch = tuple[Tensor, Tensor]  # tokens and targets

# -- rows and packs


def rows_of(tensor: Tensor, rank: int, world: int) -> Tensor:
    """The rows of a rank; torch cuts a tensor into pieces of ceil(length / world), and leaves out those that
    are empty."""
    whole = tensor.reshape(1) if tensor.dim() == 0 else tensor
    pieces = whole.chunk(world)
    return pieces[rank] if rank < len(pieces) else whole[:0]


def padded_size(shape: torch.Size, world: int) -> int:
    """Numbers of a rank's part of a parameter of that shape, padding included."""
    return rows_of(torch.empty(shape, device="meta"), 0, world).numel()


def packed_row(tensors: Sequence[Tensor], rank: int, world: int) -> Tensor:
    """The row of a rank for these tensors, padding included."""
    row = []
    for tensor in tensors:
        part = rows_of(tensor, rank, world).flatten()
        row += [part, part.new_zeros(padded_size(tensor.shape, world) - part.numel())]
    return torch.cat(row)


def packed_bytes(tensors: Iterable[Tensor], world: int, size: int) -> int:
    """Bytes of these parameters packed for all ranks, in numbers of ``size`` bytes."""
    return size * world * sum(padded_size(tensor.shape, world) for tensor in tensors)


def as_dtype(tensors: list[Tensor], name: str | None) -> list[Tensor]:
    """The tensors in this dtype; as they are for None."""
    return tensors if name is None else [tensor.to(getattr(torch, name)) for tensor in tensors]


def from_ranks(copies: list[list[Tensor]]) -> list[Tensor]:
    """The whole tensors, when each rank contributes its rows of a separate copy."""
    world = len(copies)
    joined = (
        torch.cat([rows_of(own, rank, world) for rank, own in enumerate(same)]) for same in zip(*copies)
    )
    return [whole.view(like.shape) for whole, like in zip(joined, copies[0])]


@twin
def mean_rows(passes: list[list[list[Tensor | None]]], shapes: list, rank: int) -> list[Tensor]:
    """Of gradients by pass, rank and parameter: the rank's rows of their average over the ranks, added up
    over the passes."""
    world, found = len(passes[0]), []
    for i, shape in enumerate(shapes):
        held = [own[i] for ranks in passes for own in ranks if own[i] is not None]
        total = sum((grad.double() for grad in held), torch.zeros(shape, dtype=torch.float64)) / world
        dtype = torch.float32 if held[0].dtype == torch.bfloat16 else held[0].dtype
        found.append(rows_of(total.to(dtype), rank, world))
    return found


# -- models


def llama(sizes: Mapping[str, Any], dtype: torch.dtype = torch.float64, device: str = "cpu") -> Llama:
    """A small Llama."""
    return Llama(LlamaConfig(**sizes), dtype=dtype, device=device)


def with_state(sizes: dict, state: dict[str, Tensor], frozen: list[str]) -> tuple[Llama, dict[str, Tensor]]:
    """A Llama with this state, and its trained parameters."""
    model = llama(sizes)
    model.load_state_dict(state)
    return model, {name: value for name, value in model.named_parameters() if name not in frozen}


def cross_entropy(model: Llama, batch: Batch, reduction: str) -> Tensor:
    """Over the targets that are not -100."""
    tokens, targets = batch
    logits = model(tokens)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction=reduction)


def counted(batches: Iterable[Batch]) -> int:
    """The number of targets that are not -100."""
    return sum(int((targets != -100).sum()) for _, targets in batches)


@twin
def whole_gradients(sizes: dict, state: dict, frozen: list[str], batches: list[Batch]) -> tuple[list, dict]:
    """The loss of each batch, and the mean of the gradients over them, of the trained parameters."""
    model, trained = with_state(sizes, state, frozen)
    losses = torch.stack([cross_entropy(model, batch, "mean") for batch in batches])
    grads = torch.autograd.grad(losses.mean(), list(trained.values()))
    return losses.tolist(), dict(zip(trained, grads))


@twin
def whole_training(
    sizes: dict, state: dict, frozen: list[str], steps: list[list[Batch]], lr: float, kind: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters of one process that takes all batches of a step at once."""
    model, trained = with_state(sizes, state, frozen)
    optimizer, losses = getattr(torch.optim, kind)(trained.values(), lr=lr), []
    for batches in steps:
        loss = torch.stack([cross_entropy(model, batch, "sum") for batch in batches]).sum() / counted(batches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@twin
def rank_gradients(sizes: dict, state: dict, frozen: list[str], batch: Batch, factor: float) -> dict:
    """The gradients of the summed loss of a batch, times a factor, of the trained parameters."""
    model, trained = with_state(sizes, state, frozen)
    loss = factor * cross_entropy(model, batch, "sum")
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))


@twin
def rounded_step(sizes: dict, state: dict[str, Tensor], batches: list[Batch], lr: float) -> dict[str, Tensor]:
    """One AdamW step of fp32 parameters; each rank's gradient is computed in bf16, their sum in fp32."""
    model, shadow = llama(sizes, torch.float32), llama(sizes, torch.bfloat16)
    model.load_state_dict(state)
    shadow.load_state_dict(state)
    count = counted(batches)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for batch in batches:
        shadow.zero_grad()
        (cross_entropy(shadow, batch, "sum") / count).backward()
        for parameter, rounded in zip(model.parameters(), shadow.parameters()):
            parameter.grad += rounded.grad.float()
    torch.optim.AdamW(model.parameters(), lr=lr).step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@twin
@torch.no_grad()
def rounded_losses(sizes: dict, state: dict[str, Tensor], batches: list[Batch]) -> tuple[float, list[float]]:
    """The loss of a model in bf16, each rank's part computed in fp32; and the losses of ranks that compute
    their part in bf16: with the division after, and with it before the result is rounded."""
    model = llama(sizes, torch.bfloat16)
    model.load_state_dict(state)
    count = torch.tensor(counted(batches))
    loss, wrong = 0.0, [0.0, 0.0, 0.0]
    for tokens, targets in batches:
        logits, own = model(tokens).flatten(0, 1), targets.flatten()
        loss += float(F.cross_entropy(logits.float(), own, ignore_index=-100, reduction="sum") / count)
        rounded = F.cross_entropy(logits, own, ignore_index=-100, reduction="sum")
        share = (targets != -100).sum() / count
        mean = F.cross_entropy(logits, own, ignore_index=-100)
        parts = (
            rounded.double() / count,
            (rounded * len(batches) / count).double() / len(batches),
            mean.double() * share,
        )
        wrong = [total + float(part) for total, part in zip(wrong, parts)]
    return loss, wrong


@twin
def layered(tensors: list[Tensor], xs: list[Tensor], dtype: torch.dtype | None = None) -> tuple[list, list]:
    """Outputs of tanh layers after a matrix, for the input of each rank, and the mean of the gradients of the
    mean square of an output."""
    outputs, total = [], [torch.zeros_like(tensor) for tensor in tensors]
    for x in xs:
        first, *weights = own = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]
        y = x.to(first.dtype) @ first
        for weight in weights:
            y = torch.tanh(y @ weight)
        for held, grad in zip(total, torch.autograd.grad(y.square().mean(), own)):
            held += grad.to(held.dtype) / len(xs)
        outputs.append(y.detach())
    return outputs, total


@twin
def large_layers(
    seed: int, width: int, count: int, rank: int, by: float
) -> tuple[int, list[float], list[float], list[Tensor], list[list[Tensor]]]:
    """``count`` large matrices with tanh after each but the first, on two ranks. On ``rank`` one number of
    the first matrix that comes from the other rank is larger by ``by``: its place in the flat matrix; the
    losses of the ranks; of each matrix the sum of the mean gradient; the first numbers of the rows of each
    rank; and by rank the first numbers of the gradients."""
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(width, width, generator=random) / width**0.5 for _ in range(count)]
    x = torch.randn(2, width, generator=random)
    half = (1 - rank) * width // 2
    place = (half + int(x[0, half : half + width // 2].abs().argmax())) * width
    losses, sums, sent = [], [0.0] * count, []
    for own in range(2):
        leaves = [weight.clone() for weight in weights]
        leaves[0].view(-1)[place] += by if own == rank else 0.0
        y = x @ leaves[0].requires_grad_()
        for weight in leaves[1:]:
            y = torch.tanh(y @ weight.requires_grad_())
        loss = y.square().mean()
        grads = torch.autograd.grad(loss, leaves)
        losses.append(float(loss.detach()))
        sums = [total + float(grad.sum()) / 2 for total, grad in zip(sums, grads)]
        sent.append([grad.flatten()[:KEPT_NUMBERS].clone() for grad in grads])
    first = [
        torch.stack([rows_of(weight, own, 2).flatten()[:KEPT_NUMBERS] for own in range(2)])
        for weight in weights
    ]
    return place, losses, sums, first, sent


def expected_units(sizes: Mapping[str, Any], kind: type) -> list[tuple[str, list[list[str]]]]:
    """Each unit's module and names, from the blocks in which a parameter is found."""
    model = llama(sizes, device="meta")
    blocks = {
        name: set(module.parameters()) for name, module in model.named_modules() if type(module) is kind
    }
    reached: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            reached.setdefault(parameter, []).append(f"{name}.{attribute}")
    units: dict[str, list[list[str]]] = {"": [], **{name: [] for name in blocks}}
    for parameter, names in reached.items():
        users = [name for name, held in blocks.items() if parameter in held]
        outside = any(not name.startswith(tuple(blocks)) for name in names)
        units[users[0] if len(users) == 1 and not outside else ""].append(sorted(names))
    return [(name, sorted(held)) for name, held in units.items() if held or not name]

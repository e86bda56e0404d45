"""What the results are compared with: the same on one process, and the state of a real training step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mean(values: list[Tensor]) -> Tensor:
    """The mean of the tensors of all ranks."""
    return torch.stack(values).mean(dim=0)


def trained(inputs: int, outputs: int, moments: int) -> tuple[int, float]:
    """The parameters of a layer, and the GiB of its weights, gradients and optimiser state after one step."""
    layer = nn.Linear(inputs, outputs, bias=False)
    weights = list(layer.parameters())
    if moments == 2:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(weights)
    else:
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9 * moments)
    layer(torch.ones(1, inputs)).sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    # A number such as AdamW's count of steps belongs to a whole tensor, not to each parameter.
    kept = [value for value in kept if isinstance(value, Tensor) and value.dim()]
    tensors = [*weights, *(weight.grad for weight in weights if weight.grad is not None), *kept]
    return sum(map(Tensor.numel, weights)), sum(tensor.nbytes for tensor in tensors) / 2**30

"""The trainer in one process: the gradients of any samples, of each use of a tied weight, and its steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dlo_lib.base.errors import UserError
from dlo_lib.planner.parity.float64 import doubled, settle
from dlo_lib.planner.parity.parts import Gradients
from dlo_lib.planner.parity.script import beside, built, take, trainer_of
from dlo_lib.planner.parity.trial import next_batch

_MEANS = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits}


class Counting(TorchFunctionMode):
    """In the block, the elements that losses are a mean over are counted: ``count`` without padding.

    With ``padded``, cross-entropy includes the targets that it should ignore, where they are classes.
    """

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.padded = padded
        self.count = self.ignored = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            target, ignore = args[1] if len(args) > 1 else kwargs["target"], kwargs.get("ignore_index", -100)
            if not target.is_floating_point():
                ignored = int((target == ignore).sum())
                self.count += target.numel() - ignored
                self.ignored += ignored
                if self.padded and ignore >= 0:
                    kwargs = kwargs | {"ignore_index": -100}
        elif func in _MEANS:
            self.count += args[0].numel()
        return func(*args, **kwargs)


class Twin:
    """The trainer of a file in one process. Use it within ``in_float64``."""

    def __init__(self, file: Path) -> None:
        with beside(file):
            trainer = trainer_of(file)
            made = built(trainer)
        if len(made.models) != 1:
            raise UserError("build() must return one whole model where no process group is initialised")
        self.model, self.loss = made.models[0], trainer.loss
        self.optimizers, self.batches = made.optimizers, made.batches
        settle(self.model)
        self.parameters = dict(self.model.named_parameters())
        self.aliases = aliases_of(self.model)

    def values(self) -> Gradients:
        """Return a copy of all parameters."""
        return {name: one.detach().to("cpu", copy=True) for name, one in self.parameters.items()}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters."""
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    def next_batch(self) -> Any:
        """Return the next global batch, in float64."""
        return doubled(next_batch(self.batches))

    def gradients(self, batch: Any, rows: Any = None, padded: bool = False) -> Gradients:
        """Return the gradients of the mean loss of a batch, or of some of its rows."""
        with Counting(padded) as counting:
            loss = self.loss(self.model, batch if rows is None else take(batch, rows))
        self.counting = counting
        return gradients_of(loss, self.parameters)

    def uses(self, batch: Any) -> dict[str, list[Gradients]]:
        """Return, for each tied parameter, the gradient of each of its uses."""
        found = {}
        for name in set(self.aliases.values()):
            model = copy.deepcopy(self.model)
            places = [name, *(alias for alias, first in self.aliases.items() if first == name)]
            own = {}
            for place in places:
                module, _, last = place.rpartition(".")
                own[place] = nn.Parameter(self.parameters[name].detach().clone())
                setattr(model.get_submodule(module), last, own[place])
            each = gradients_of(self.loss(model, batch), own)
            found[name] = [{name: each[place]} for place in places]
        return found

    def step(self, gradients: Gradients) -> Gradients:
        """Make a step with these gradients; return the parameters after it."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.grad = gradients[name].to(parameter.device)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        return self.values()


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, each with the first one."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            found[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return found


def gradients_of(loss: Tensor, parameters: Mapping[str, Tensor]) -> Gradients:
    """Return the gradients of a loss on the CPU, zeros for a parameter that it does not depend on."""
    wanted = {name: one for name, one in parameters.items() if one.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    result = {name: torch.zeros_like(one, device="cpu") for name, one in parameters.items()}
    result |= {name: one.detach().cpu() for name, one in zip(wanted, found) if one is not None}
    return result


def total_norm(tensors: list[Tensor]) -> float:
    """Return the 2-norm of all elements."""
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor by which ``clip_grad_norm_`` scales gradients of this norm."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip(gradients: Gradients, max_norm: float | None) -> Gradients:
    """Return the gradients as ``clip_grad_norm_`` scales them."""
    if max_norm is None:
        return gradients
    factor = clip_factor(total_norm(list(gradients.values())), max_norm)
    return {name: factor * one for name, one in gradients.items()}

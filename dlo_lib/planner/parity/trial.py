"""The trainer on a rank, and what it records: gradients before the optimiser's step, parameters after it, and
the samples that its model reads.

Each rank records its part of each parameter and communicates nothing, except for gradients whose sum is still
pending (DTensor).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from dlo_lib.base.errors import UserError
from dlo_lib.planner.parity.float64 import doubled, in_float64, settle
from dlo_lib.planner.parity.script import beside, built, trainer_of

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
Slices = tuple[slice, ...]


@dataclass
class HeldPart:
    """The part of a parameter that a rank holds.

    ``slices`` is the place of a DTensor's part in the whole; None for another tensor.
    """

    name: str
    start: Tensor
    slices: Slices | None


@dataclass
class TwinPiece:
    """What the twin computed beside one micro-batch of a marked script: its gradients, and the elements that
    its mean is over (0: unknown)."""

    gradients: dict[str, Tensor]
    count: int


@dataclass
class RankStep:
    """One step of a rank, by the names of its parameters.

    ``unclipped`` has the gradients before ``clip_grad_norm_``, where it was called. ``reads`` has, for each
    call of the model, the rows of the global batch; None for a call whose input is no part of the batch.
    ``batch`` has the sums of the global batch.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    unclipped: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    reads: list[tuple[int, ...] | None] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)
    pieces: list[TwinPiece] = field(default_factory=list)
    twin: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class RankRecord:
    """What a rank reports."""

    parts: list[HeldPart] = field(default_factory=list)
    steps: list[RankStep] = field(default_factory=list)
    max_norm: float | None = None
    batch_norm: bool = False
    start: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def named(models: list[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of the parts of a model by their names without those of wrappers. A tied
    parameter is there once."""
    found: dict[str, nn.Parameter] = {}
    for part, model in enumerate(models):
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        for name, parameter in inner.named_parameters():
            name = _WRAPPERS.sub("", name)
            found[f"{part}:{name}" if name in found else name] = parameter
    return found


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a copy on the CPU."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.detach().to("cpu", copy=True)


def place_of(tensor: Any) -> Slices | None:
    """Return the place of this rank's part in a DTensor; None for another tensor."""
    if not hasattr(tensor, "placements"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh: Any = tensor.device_mesh
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape))


def gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient; zeros where there is none."""
    found: Any = parameter.grad
    if found is None:
        return torch.zeros_like(local(parameter))
    if hasattr(found, "placements") and found.placements != (
        wanted := getattr(parameter, "placements", None)
    ):  # a pending sum
        found = found.redistribute(placements=wanted)
    return local(found)


class StepRecorder:
    """Records the steps of the optimisers of a rank while it is active."""

    def __init__(self, parameters: Callable[[], dict[str, nn.Parameter]]) -> None:
        self.parameters = parameters
        self.record = RankRecord()
        self.step = RankStep()

    def begin(self) -> None:
        """Record the parts of the parameters before the first step."""
        parameters = self.parameters()
        self.record.parts = [
            HeldPart(name, local(parameter), place_of(parameter)) for name, parameter in parameters.items()
        ]

    def finish(self) -> None:
        """Record the parameters after a step.

        Raises:
            UserError: no optimiser of PyTorch made a step.
        """
        if not self.step.gradients:
            raise UserError(
                "the trainer made no step of a torch.optim.Optimizer: parity compares its gradients"
            )
        self.step.after = {name: local(parameter) for name, parameter in self.parameters().items()}
        self.record.steps.append(self.step)
        self.step = RankStep()

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the gradients that an optimiser receives."""
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        first = not self.step.gradients
        for name, parameter in self.parameters().items():
            # What no optimiser updates has its gradient too, so that a forgotten parameter is seen.
            if first or id(parameter) in owned:
                self.step.gradients[name] = gradient(parameter)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the block, steps of optimisers and calls of ``clip_grad_norm_`` are recorded."""
        utils = (torch.nn.utils, torch.nn.utils.clip_grad)
        clip = torch.nn.utils.clip_grad_norm_

        def clipping(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            ours, self.record.max_norm = {id(one) for one in parameters}, float(max_norm)
            self.step.unclipped |= {
                name: gradient(one) for name, one in self.parameters().items() if id(one) in ours
            }
            return clip(parameters, max_norm, *args, **kwargs)

        for module in utils:
            module.clip_grad_norm_ = clipping  # type: ignore[attr-defined]
        hook = register_optimizer_step_pre_hook(self.before)
        try:
            yield
        finally:
            hook.remove()
            for module in utils:
                module.clip_grad_norm_ = clip  # type: ignore[attr-defined]


def rows_in(tensor: Tensor, batch: Tensor) -> tuple[int, ...] | None:
    """Return the rows of ``batch`` that ``tensor`` consists of; None if it consists of others.

    >>> rows_in(torch.tensor([[3, 4], [1, 2]]), torch.tensor([[1, 2], [3, 4]]))
    (1, 0)
    """
    if not tensor.dim() or tensor.shape[1:] != batch.shape[1:] or tensor.dtype != batch.dtype:
        return None
    equal = (tensor.flatten(1)[:, None] == batch.to(tensor.device).flatten(1)[None]).all(-1)
    rows: list[int] = []
    for row in equal.tolist():
        places = [index for index, same in enumerate(row) if same]
        if not places:
            return None
        rows.append(next((place for place in places if place not in rows), places[0]))
    return tuple(rows)


def _reads(
    step: Callable[[], RankStep], batch: Callable[[], Any], model: nn.Module, args: Any, kwargs: Any
) -> None:
    """Record which rows of the batch a call of the model reads."""
    if not torch.is_grad_enabled():
        return
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not given or any(leaf.is_meta or hasattr(leaf, "fake_mode") for leaf in given):  # asks for shapes
        return
    whole = [leaf for leaf in tree_leaves(batch()) if isinstance(leaf, Tensor) and leaf.dim()]
    for leaf in sorted(whole, key=Tensor.numel, reverse=True):
        for tensor in given:
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if (rows := rows_in(tensor.detach(), leaf)) is not None:
                step().reads.append(rows)
                return
    step().reads.append(None)


def checksums(batch: Any) -> list[float]:
    """Return a number for each tensor of a batch, which depends on the order of its elements."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [float(leaf.cpu().double().flatten() @ torch.arange(1.0, leaf.numel() + 1)) for leaf in leaves]


def run_trial(file: Path, steps: int) -> RankRecord:
    """Run ``steps`` steps of the trainer that a file offers on this rank; all ranks of the group call it.

    Raises:
        UserError: the file offers no trainer, or one that parity cannot compare.
    """
    with in_float64(), beside(file):
        trainer = trainer_of(file)
        made = built(trainer)
        models = made.models
        for model in models:
            settle(model)
        recorder = StepRecorder(partial(named, models))
        recorder.begin()
        record = recorder.record
        record.max_norm = trainer.max_norm
        record.batch_norm = any(
            isinstance(one, nn.modules.batchnorm._BatchNorm) for model in models for one in model.modules()
        )
        current: list[Any] = [None]
        hooks = [
            model.register_forward_pre_hook(
                partial(_reads, lambda: recorder.step, lambda: current[0]), with_kwargs=True
            )
            for model in models
        ]
        with recorder.watching():
            for _ in range(steps):
                current[0] = doubled(next_batch(made.batches))
                recorder.step.batch = checksums(current[0])
                trainer.step(*made.given, current[0])
                recorder.finish()
        for hook in hooks:
            hook.remove()
    return record


def next_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch.

    Raises:
        UserError: there is none.
    """
    try:
        return next(batches)
    except StopIteration:
        raise UserError("the batches of build() end early: give one for each step") from None

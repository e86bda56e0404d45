"""Which optimisers may update a part of the model: parts of parameters, or some of the parameters.

    each element by itself      AdamW, SGD, ...               any part
    each parameter by itself    Adafactor, Muon, LARS, ...    whole parameters
    all parameters together     Prodigy, L-BFGS, ...          the whole model

For the optimisers of PyTorch and of this library, the first kind is known. Another one is tried on small
parameters: it makes a few steps with all of them, and with a part of them. If the part then differs, an
update depends on other elements, as with the norms of LARS, the rows and columns of Adafactor, the orthogonal
matrices of Muon, or the step size that Prodigy estimates from all parameters.

Cost: some steps of an unknown optimiser on 50 to 300 elements, once.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlo_lib.optim.entry import UpdateReach
from dlo_lib.optim.registry import classes_by_reach

ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
) | classes_by_reach(UpdateReach.ELEMENT)
"""The optimisers that update each element independently, and can therefore update parts of parameters."""

# Muon is in torch 2.9 and later.
_EACH_PARAM = (
    ELEMENTWISE
    | {getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)}
    | classes_by_reach(UpdateReach.NORM, UpdateReach.PARAMETER, UpdateReach.MATRIX)
)

_NOT_ELEMENTWISE = tuple(classes_by_reach(*set(UpdateReach) - {UpdateReach.ELEMENT}))

_GRAD_SCALES = (*[1.0] * 8, 1e3, 1e3)
"""The scales of the gradients of the steps: enough steps for an estimate of the step size to change, and
gradients that a limit of their norm clips."""
_LEARNING_RATES = (None, 0.1, 1.0)
"""None: that of the optimiser. It may be 0 in a warm-up, and an estimate may begin to change late with it."""
_ROWS, _MATRIX = 2, (4, 6)
_LARGEST = 5
"""The largest size of a dimension of a small parameter."""
_CLOSE = 1e-4
"""The largest difference, relative to the largest change of a parameter."""

Group = dict[str, Any]
Make = Callable[[list[Group]], torch.optim.Optimizer]


class _Part(NamedTuple):
    """Some parameters of each group, and some rows of them."""

    params: slice = slice(None)
    rows: slice | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return the rows of ``values``, (any, *shape of a parameter)."""
        return values if self.rows is None else values[:, self.rows]


def updates_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` updates each element independently of the others. Its parameters and its
    state are not changed.

    A class whose attribute ``updates_shards`` is True reads ``param.shard_of`` and computes over the ranks
    itself.
    """
    optimizer = _innermost(optimizer)
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "updates_shards", False):
        return True
    if isinstance(optimizer, _NOT_ELEMENTWISE):  # with small parameters, 8-bit AdamW is elementwise
        return False
    params = [param for group in optimizer.param_groups for param in group["params"]]
    shapes: list[list[tuple[int, ...]]] = [[_MATRIX] for _ in optimizer.param_groups]

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        return _copy_of(optimizer, groups, params)

    groups = [_options_of(group) for group in optimizer.param_groups]
    return _Trial(make, groups, shapes, _device_of(params), [_Part(rows=slice(0, _ROWS))]).parts_agree()


def updates_params(
    optimizer_cls: type[torch.optim.Optimizer], groups: Sequence[Group], options: Group
) -> bool:
    """Return whether ``optimizer_cls(groups, **options)`` updates each parameter independently of the others.

    A class whose attribute ``updates_each_param`` is True is not tried.
    """
    if optimizer_cls in _EACH_PARAM or getattr(optimizer_cls, "updates_each_param", False):
        return True
    params = [param for group in groups for param in group["params"]]
    if any(type(param) not in (Tensor, nn.Parameter) for param in params):
        return True  # fake tensors of a simulation, which have no values

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        return optimizer_cls(groups, **options)

    return _updates_alone(make, groups)


def updates_params_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return what ``updates_params`` does, of an optimiser that exists. Its parameters and its state are not
    changed."""
    optimizer = _innermost(optimizer)
    if type(optimizer) in _EACH_PARAM or getattr(optimizer, "updates_each_param", False):
        return True
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        return _copy_of(optimizer, groups, params)

    return _updates_alone(make, optimizer.param_groups)


def _updates_alone(make: Make, groups: Sequence[Group]) -> bool:
    params = [param for group in groups for param in group["params"]]
    held = [_options_of(group) for group in groups]
    shapes = [_small_shapes(group["params"]) for group in groups]
    parts = [_Part(slice(first, None, 2)) for first in (0, 1)]
    return _Trial(make, held, shapes, _device_of(params), parts).parts_agree()


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser that ``optimizer`` wraps: that of ``MasterWeights``, or of a sharded one. One that
    computes over the ranks itself counts as a whole."""
    if getattr(optimizer, "updates_shards", False):
        return optimizer
    for name in ("_inner", "local"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return _innermost(inner)
    return optimizer


@dataclass(frozen=True)
class _Trial:
    """Steps of an unknown optimiser with small parameters.

    Attributes:
        make: makes the optimiser of groups of parameters.
        groups: the options of the groups.
        shapes: the shapes of the parameters of each group.
        device: the device of the parameters.
        parts: those that are compared with all parameters.
    """

    make: Make
    groups: Sequence[Group]
    shapes: Sequence[Sequence[tuple[int, ...]]]
    device: torch.device
    parts: Sequence[_Part]

    def parts_agree(self) -> bool:
        """Return whether steps with all parameters, and with parts of them, change these parts equally."""
        for dtype, with_closure in itertools.product((torch.float64, torch.float32), (False, True)):
            try:
                return all(self._agree(dtype, with_closure, rate) for rate in _LEARNING_RATES)
            except Exception:  # noqa: BLE001 - it may need a closure, or parameters in fp32
                continue
        return False  # it needs other parameters: it is not known to be right

    def _agree(self, dtype: torch.dtype, with_closure: bool, rate: float | None) -> bool:
        random = torch.Generator().manual_seed(0)
        rows = 2 + len(_GRAD_SCALES)
        values = [
            [torch.randn(rows, *shape, generator=random).to(self.device, dtype) for shape in some]
            for some in self.shapes
        ]
        whole = self._updated(values, _Part(), with_closure, rate)
        for part in self.parts:
            after = self._updated(values, part, with_closure, rate)
            for some, expected, found in zip(values, whole, after, strict=True):
                for first, one, other in zip(some[part.params], expected[part.params], found, strict=True):
                    if not _is_close(part.of(one), other, part.of(first)[0]):
                        return False
        return True

    def _updated(
        self, values: Sequence[Sequence[Tensor]], part: _Part, with_closure: bool, rate: float | None
    ) -> list[list[Tensor]]:
        """Return the parameters of ``part`` after each step, (steps, *shape), by group. The gradient of an
        element depends on this element only.

        Args:
            values: the first value and the aim of each parameter, and factors of its gradients.
        """
        chosen = [[part.of(value) for value in some[part.params]] for some in values]
        params = [[nn.Parameter(value[0].clone()) for value in some] for some in chosen]
        groups = [{**group, "params": some} for group, some in zip(self.groups, params, strict=True)]
        optimizer: Any = self.make(groups)
        _set_rate(optimizer.param_groups, rate)
        pairs = [pair for both in zip(params, chosen) for pair in zip(*both)]
        history: list[list[list[Tensor]]] = [[[] for _ in some] for some in params]

        def compute_gradients(step: int) -> Tensor:
            for param, value in pairs:
                param.grad = _GRAD_SCALES[step] * value[2 + step].abs() * (param.detach() - value[1])
            return torch.ones(())

        with torch.random.fork_rng(devices=[]):
            for step in range(len(_GRAD_SCALES)):
                torch.manual_seed(0)
                compute_gradients(step)
                optimizer.step(*[functools.partial(compute_gradients, step)] * with_closure)
                for taken, some in zip(history, params):
                    for steps, param in zip(taken, some):
                        steps.append(param.detach().clone())
        return [[torch.stack(steps) for steps in taken] for taken in history]


def _is_close(expected: Tensor, found: Tensor, first: Tensor) -> bool:
    """Compare the values after each step, (steps, *shape), relative to their distance from the ``first``
    ones. Steps that diverge are left out."""
    steps = len(expected)
    finite = expected.reshape(steps, -1).isfinite().all(1)
    change, difference = (
        (expected - other).abs().reshape(steps, -1).amax(1)[finite] for other in (first, found)
    )
    rounding = 8 * torch.finfo(first.dtype).eps * float(first.abs().max())
    return bool((difference <= _CLOSE * change + rounding).all())


def _copy_of(
    optimizer: torch.optim.Optimizer, groups: list[Group], params: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` with other groups and without a state. A schedule replaces the ``step``
    of the optimiser, which the copy leaves out.

    Raises:
        ValueError: the optimiser has a list of its ``params`` that the copy would change.
    """
    twin: Any = object.__new__(type(optimizer))
    held = {key: copy.copy(value) for key, value in vars(optimizer).items() if key != "step"}
    real = set(map(id, params))
    for key, value in held.items():
        if key not in ("param_groups", "state") and real.intersection(map(id, _members(value))):
            raise ValueError(f"{key} holds parameters")
    twin.__dict__.update(held)
    twin.state, twin.param_groups = defaultdict(dict), groups
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    copied: torch.optim.Optimizer = twin
    return copied


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list | tuple | set) else (value,)


def _options_of(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _set_rate(groups: list[Group], rate: float | None) -> None:
    for group in groups:
        own = group.get("lr")
        if rate is not None and own is not None:
            group["lr"] = torch.full_like(own, rate) if isinstance(own, Tensor) else rate


def _small_shapes(params: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return different shapes of small parameters with the dimensions of ``params``: two to four of them."""
    shapes = [tuple(min(size, _LARGEST) for size in param.shape) for param in params if param.numel()]
    found = list(dict.fromkeys(shapes))[:4] or [_MATRIX]
    return found if len(found) > 1 else found * 2


def _device_of(params: Sequence[Tensor]) -> torch.device:
    return params[0].device if params else torch.device("cpu")

"""A script of torchrun with two marked lines, on a rank: its twin computes the same loss beside it.

The marked expression of the loss is a function of its names (``script.compiled``). It is called with the
trainer's model, whose loss the script receives, and with the twin, a copy from before the model was wrapped.
After each step of the optimiser, the ranks exchange the gradients of their twins, which then make the same
step with the mean over all of them.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dlo_lib.base.errors import UserError
from dlo_lib.planner.parity.directions import Call, Reading
from dlo_lib.planner.parity.float64 import in_float64, settle
from dlo_lib.planner.parity.parts import Gradients
from dlo_lib.planner.parity.script import HOOK, beside, compiled
from dlo_lib.planner.parity.trial import RankRecord, StepRecorder, TwinPiece, named
from dlo_lib.planner.parity.twin import Counting, aliases_of, clip, gradients_of


class _Enough(BaseException):
    """Ends the script after its last step; no ``except Exception`` catches it."""


class MarkedLines:
    """What the marked lines of a script call."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.trained: nn.Module | None = None
        self.recorder = StepRecorder(lambda: named([self._model]))
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def _model(self) -> nn.Module:
        if self.trained is None:
            raise UserError("the optimiser makes a step before the line with # parity: model runs")
        return self.trained

    def model(self, model: Any) -> Any:
        """Keep a copy of the model of the script, both in float64.

        Raises:
            UserError: it is no module.
        """
        if not isinstance(model, nn.Module):
            raise UserError(f"the line with # parity: model assigns a {type(model).__name__}: mark a module")
        model.double()
        settle(model)
        self.trained, self.twin = model, copy.deepcopy(model)
        record = self.recorder.record
        record.start = {name: one.detach().cpu().clone() for name, one in named([self.twin]).items()}
        record.aliases = aliases_of(self.twin)
        return model

    def loss(self, expression: Callable[..., Tensor], *names: tuple[str, Any]) -> Tensor:
        """Return the loss of the script, and compute the gradients of its twin.

        Raises:
            UserError: no name in the expression is the model.
        """
        result = expression(*(value for _, value in names))
        if not torch.is_grad_enabled():
            return result
        twins = [self.twin if self._is_model(value) else value for _, value in names]
        if all(one is value for one, (_, value) in zip(twins, names)):
            raise UserError("no name in the line with # parity: loss is the marked model: call it there")
        with Counting() as counting:
            loss = expression(*twins)
        self.recorder.step.pieces.append(TwinPiece(gradients_of(loss, named([self.twin])), counting.count))
        return result

    def _is_model(self, value: Any) -> bool:
        return isinstance(value, nn.Module) and any(one is self.trained for one in value.modules())

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the parts of the parameters before the first step, and make the optimiser of the twin."""
        if self.optimizer is not None:
            return
        self.recorder.begin()
        names = {id(one): name for name, one in named([self._model]).items()}
        twins = named([self.twin])
        groups = []
        for group in optimizer.param_groups:
            if unknown := [one for one in group["params"] if id(one) not in names]:
                raise UserError(
                    f"the optimiser has {len(unknown)} parameters that the marked model has not (flat "
                    "parameters cannot be compared): mark the model before it is wrapped"
                )
            groups.append(group | {"params": [twins[names[id(one)]] for one in group["params"]]})
        accepted = inspect.signature(type(optimizer)).parameters
        given = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        self.optimizer = type(optimizer)(groups, **given)

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Make the step of the twin, and end the script after the last one."""
        step, record = self.recorder.step, self.recorder.record
        if not step.pieces:
            raise UserError("the line with # parity: loss did not run before the optimiser's step")
        everything: list[list[TwinPiece]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everything, step.pieces)
        right = clip(weighed([piece for pieces in everything for piece in pieces]), record.max_norm)
        twins = named([self.twin])
        for name, parameter in twins.items():
            parameter.grad = right[name].to(parameter.device) if parameter.requires_grad else None
        assert self.optimizer is not None
        for ours, theirs in zip(self.optimizer.param_groups, optimizer.param_groups):
            ours["lr"] = theirs["lr"]  # of a schedule
        with self._unwatched():
            self.optimizer.step()
        if dist.get_rank() == 0:
            step.twin = {name: one.detach().cpu().clone() for name, one in twins.items()}
        self.recorder.finish()
        if len(record.steps) == self.steps:
            raise _Enough

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self.own = True
        try:
            yield
        finally:
            self.own = False

    own = False


def run_marked(file: Path, lines: dict[str, int], arguments: list[str], steps: int) -> RankRecord:
    """Run a marked script on this rank until its optimiser has made ``steps`` steps; all ranks call it.

    Raises:
        UserError: the script ends early, or its marks are on other lines than described.
    """
    marked = MarkedLines(steps)
    code = compiled(file, lines)
    main = ModuleType("__main__")
    vars(main).update({"__file__": str(file), HOOK: marked})
    kept, kept_main = sys.argv[:], sys.modules["__main__"]
    group: Any = dist
    leave, enter = group.destroy_process_group, group.init_process_group
    sys.argv[:] = [str(file), *arguments]
    sys.modules["__main__"] = main
    group.destroy_process_group = group.init_process_group = lambda *_, **__: None  # there is one
    hooks = [
        register_optimizer_step_pre_hook(lambda *given: None if marked.own else marked.before(*given)),
        register_optimizer_step_post_hook(lambda *given: None if marked.own else marked.after(*given)),
    ]
    try:
        with in_float64(), beside(file), marked.recorder.watching():
            exec(code, vars(main))
    except _Enough:
        return marked.recorder.record
    finally:
        for hook in hooks:
            hook.remove()
        group.destroy_process_group, group.init_process_group = leave, enter
        sys.argv[:], sys.modules["__main__"] = kept, kept_main
    raise UserError(f"{file.name} ends after {len(marked.recorder.record.steps)} steps: parity needs {steps}")


def weighed(pieces: list[TwinPiece]) -> Gradients:
    """Return the gradients of the mean over the elements of all pieces."""
    counts = [piece.count or 1 for piece in pieces]
    return {
        name: sum(count * piece.gradients[name] for count, piece in zip(counts, pieces)) / sum(counts)  # type: ignore[misc]
        for name in pieces[0].gradients
    }


def marked_reading(
    records: list[RankRecord], number: int, earlier: Gradients | None
) -> tuple[Reading, tuple[int, int] | None]:
    """Return what the twins of the ranks computed in a step, and two ranks that read the same samples."""
    pieces = [record.steps[number].pieces for record in records]

    def mean_of(calls: list[Call]) -> Gradients:
        return weighed([pieces[rank][call] for rank, call in calls])

    right = weighed([piece for each in pieces for piece in each])
    pairs = [
        (one, two) for two in range(len(pieces)) for one in range(two) if _same(pieces[one], pieces[two])
    ]
    calls = [len(each) for each in pieces]
    kinds = len(pieces) - len({two for _, two in pairs})
    return Reading(right, calls, mean_of, None, {}, earlier, kinds), pairs[0] if pairs else None


def _same(one: list[TwinPiece], other: list[TwinPiece]) -> bool:
    return len(one) == len(other) and all(
        all(
            torch.allclose(tensor, b.gradients[name], rtol=1e-9, atol=1e-14)
            for name, tensor in a.gradients.items()
        )
        for a, b in zip(one, other)
    )

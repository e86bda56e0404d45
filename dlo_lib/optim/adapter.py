"""A schedule as a PyTorch scheduler: ``scheduler.step()`` sets the learning rate of the next step.

The learning rate of each parameter group is its peak (the ``lr`` it was created with) times
``schedule(step)``. A schedule with a momentum also sets SGD's ``momentum`` or Adam's beta 1. The state is the
step and the peaks. Loading it also sets the learning rate, so optimiser and scheduler can be loaded in any
order."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dlo_lib.base.errors import UserError
from dlo_lib.optim.schedules import LRSchedule, MomentumSchedule


class ScheduleLR(LRScheduler):
    """Set the learning rates of an optimiser, and its momentum if the schedule has one.

    Call ``step`` after each optimiser step.

    Raises:
        UserError: the schedule has a momentum and the optimiser has none.
    """

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule, last_epoch: int = -1) -> None:
        self.schedule = schedule
        if isinstance(schedule, MomentumSchedule) and not {"momentum", "betas"} & optimizer.defaults.keys():
            raise UserError(
                f"{type(schedule).__name__} sets the momentum, {type(optimizer).__name__} has none: "
                "use SGD or Adam"
            )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group for the next step; set the momentum, as PyTorch's schedulers
        do. The peak of a group that was added later is the ``lr`` that it was added with.
        """
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        if isinstance(self.schedule, MomentumSchedule):
            momentum = self.schedule.momentum(self.last_epoch)
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return [peak * self.schedule(self.last_epoch) for peak in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of completed steps and the peak learning rates."""
        return {"step": self.last_epoch, "peaks": list(self.base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the step and the peaks, and set the learning rates.

        Raises:
            UserError: the optimiser has another number of parameter groups.
        """
        saved, held = len(state_dict["peaks"]), len(self.optimizer.param_groups)
        if saved != held:
            raise UserError(
                f"the schedule was saved with {saved} parameter groups, the optimiser has {held}: "
                "add the same groups before loading"
            )
        self.last_epoch, self.base_lrs = state_dict["step"], list(state_dict["peaks"])
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

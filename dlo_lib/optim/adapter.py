"""A schedule as a torch scheduler: after ``scheduler.step()`` the optimiser has the learning rate of the next step.

The learning rate of each group is its own peak, the ``lr`` that it was made with, times ``schedule(step)``; a schedule that says a momentum
sets SGD's ``momentum`` or Adam's beta 1. What has to be saved is one number, the step: loading it also sets the learning rate, so that the
order in which optimiser and scheduler are loaded does not matter.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dlo_lib.errors import UserError
from dlo_lib.optim.schedules import MomentumSchedule, Schedule


class ScheduleLR(LRScheduler):
    """Sets the optimiser's learning rates, and momentum where the schedule says one; call ``step`` after each optimiser step.

    Raises:
        UserError: the schedule says a momentum, and the optimiser has none.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_epoch: int = -1) -> None:
        self.schedule = schedule
        if isinstance(schedule, MomentumSchedule) and not {"momentum", "betas"} & optimizer.defaults.keys():
            raise UserError(f"{type(schedule).__name__} moves the momentum, {type(optimizer).__name__} has none: use SGD or Adam")
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Of each group, for the step that comes next; sets the momentum as torch's own do."""
        if isinstance(self.schedule, MomentumSchedule):
            momentum = self.schedule.momentum(self.last_epoch)
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return [peak * self.schedule(self.last_epoch) for peak in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """The steps done and the peaks: plain numbers."""
        return {"step": self.last_epoch, "peaks": list(self.base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self.base_lrs = state_dict["step"], list(state_dict["peaks"])
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

"""The forms in which a model is spread over ranks: one table, from the option ``--parallel`` to what wraps the model.

What a form promises is what ``train_step`` asks of it: gradients that are the mean over the ranks of ``group`` when the step's last
backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from dlo_lib.parallel.ddp import DDP
from dlo_lib.profiling.settings import Parallel


def _alone(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return model


def _ddp(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return DDP(model, group=group)


FORMS: dict[Parallel, Callable[[nn.Module, dist.ProcessGroup | None], nn.Module]] = {Parallel.NONE: _alone, Parallel.DDP: _ddp}

"""Which optimisers may update parts of parameters: those that update each element by itself.

For the optimisers of PyTorch and of this library, this is known. Another one is tried on small matrices: it
makes a few steps with whole matrices, and with their first rows only. If the first rows then differ, an
update depends on other elements, as with the norms of LARS, the rows and columns of Adafactor, or the
orthogonal matrices of Muon.

Cost: a few steps of an unknown optimiser on 48 elements, once.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

from dlo_lib.kernels import FusedAdamW

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
) | {FusedAdamW}
"""The optimisers that update each element independently, and can therefore update parts of parameters."""

_STEPS = 3
_ROWS, _ALL_ROWS = 2, 4


def updates_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` updates each element independently of the others. Its parameters and its
    state are not changed.

    A class whose attribute ``updates_shards`` is True reads ``param.shard_of`` and computes over the ranks
    itself.
    """
    inner = getattr(optimizer, "_inner", None)  # of MasterWeights
    if isinstance(inner, torch.optim.Optimizer):
        return updates_elements(inner)
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "updates_shards", False):
        return True
    try:
        whole, part = _updated(optimizer, _ALL_ROWS), _updated(optimizer, _ROWS)
    except Exception:  # noqa: BLE001 - it needs a closure, or other parameters: it is not known to be right
        return False
    return all(torch.allclose(one[:_ROWS], other, atol=1e-6) for one, other in zip(whole, part, strict=True))


def _updated(optimizer: torch.optim.Optimizer, rows: int) -> list[torch.Tensor]:
    """Return small matrices after a few steps of a copy of ``optimizer`` with the same options. Of ``rows``
    rows, the first ones are the same for any number. A schedule replaces the ``step`` of the optimiser, which
    the copy leaves out."""
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(_STEPS + 1, _ALL_ROWS, 6, generator=random) for _ in optimizer.param_groups]
    params = [nn.Parameter(value[0, :rows].clone()) for value in values]
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update({key: copy.copy(held) for key, held in vars(optimizer).items() if key != "step"})
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [param]} | ({"lr": 0.1} if "lr" in group else {})  # it may be 0 in a warm-up
        for group, param in zip(optimizer.param_groups, params, strict=True)
    ]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    with torch.random.fork_rng(devices=[]):
        for step in range(_STEPS):
            for param, value in zip(params, values, strict=True):
                param.grad = value[step + 1, :rows].clone()
            torch.manual_seed(0)
            twin.step()
    return [param.detach() for param in params]

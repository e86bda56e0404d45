"""Optimisers that PyTorch does not have take the steps of those of ``pytorch_optimizer``, in float64.

Compared where both follow the paper. There LARS does not decay a vector; SOAP decays after the step, and
sorts the basis before each QR decomposition; LAMB has no bias correction at all. ``test_papers`` compares
these parts with the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dlo_lib.optim.lars import LARS
from dlo_lib.optim.lion import Lion
from dlo_lib.optim.schedule_free import ScheduleFreeAdamW
from dlo_lib.optim.soap import SOAP

MATRICES = ((5, 3), (3, 6))
STEPS = 20
CASES: dict[str, tuple[Callable[..., Any], str, dict[str, Any], dict[str, str], Any]] = {
    "lion": (Lion, "Lion", {"lr": 0.01, "weight_decay": 0.1}, {}, (*MATRICES, (4,))),
    "lars": (
        LARS,
        "LARS",
        {"lr": 0.5, "weight_decay": 0.1, "trust": 0.01},
        {"trust": "trust_coefficient"},
        MATRICES,
    ),
    "lars with nesterov": (
        LARS,
        "LARS",
        {"lr": 0.5, "trust": 0.01, "nesterov": True},
        {"trust": "trust_coefficient"},
        (*MATRICES, (4,)),
    ),
    "soap in its first basis": (
        SOAP,
        "SOAP",
        {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-15, "every": STEPS},
        {"every": "precondition_frequency"},
        ((4, 4), (3, 3)),  # one gradient of other shapes does not determine the basis
    ),
    "schedule-free": (
        ScheduleFreeAdamW,
        "ScheduleFreeAdamW",
        {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 5},
        {},
        (*MATRICES, (4,), ()),
    ),
}
"""Ours, the name there, settings, names of settings there, shapes of parameters."""


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_that_of_the_peer(name: str):
    import pytorch_optimizer

    ours, theirs, settings, names, shapes = CASES[name]
    random = torch.Generator().manual_seed(0)

    def draw(shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    params = [nn.Parameter(draw(shape)) for shape in shapes]
    peers = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = ours(params, **settings)
    there = {names.get(setting, setting): value for setting, value in settings.items()}
    peer = getattr(pytorch_optimizer, theirs)(peers, **there)
    for each in (optimizer, peer):
        if hasattr(each, "train"):
            each.train()
    for _ in range(STEPS):
        before = [param.detach().clone() for param in params]
        for param, other in zip(params, peers, strict=True):
            param.grad = draw(param.shape)
            other.grad = param.grad.clone()  # a peer may write to it
        optimizer.step()
        peer.step()
        for param, other in zip(params, peers, strict=True):
            torch.testing.assert_close(param, other, rtol=1e-12, atol=1e-14)
    assert all(not torch.equal(param, old) for param, old in zip(params, before, strict=True))

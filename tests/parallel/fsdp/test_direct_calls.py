"""Methods of a module inside FSDP that are called directly: right, or refused in one sentence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.parallel import FSDP

RANKS = 2
MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


class Text(nn.Module):
    """A model with the methods of its users."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.scale = nn.Parameter(torch.ones(1, 4))
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.features(tokens) * self.scale

    def features(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def scaled(self, tokens: Tensor) -> Tensor:
        return self.features(tokens) * self.scale

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.table.weight.T

    def gathered(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.table.weight)

    def added(self, x: Tensor) -> Tensor:
        return x.add_(self.scale.detach().float())

    def penalty(self) -> Tensor:
        return sum(param.square().sum() for param in self.parameters())

    def largest(self) -> float:
        return max(self.scale[:1].sum().item(), 0)

    def groups(self) -> list[dict[str, Any]]:
        named = dict(self.named_parameters())
        matrices = [param for param in named.values() if param.dim() > 1 and param.numel() >= 0]
        return [{"params": matrices, "weight_decay": 0.1, "lr": 0.1}]

    def restart(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param)
            param.data.mul_(0.5)

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


def fails(model: FSDP, name: str, *args: Any) -> None:
    with pytest.raises(UserError, match=r"is used outside of the forward.*call_method"):
        getattr(model.module, name)(*args)
        pytest.fail(f"{name} computed with a shard")


def test_a_method_that_is_called_directly_is_right_or_refused():
    def call() -> None:
        torch.manual_seed(0)
        module = Text()
        twin, model = copy.deepcopy(module), FSDP(module)
        tokens, x = torch.tensor([[1, 5, 2]]), torch.randn(3, 4)
        for mode in MODES:
            with mode():
                expected = twin(tokens)
                torch.testing.assert_close(model(tokens), expected)
                torch.testing.assert_close(model.module(tokens), expected)
                torch.testing.assert_close(model.module.features(tokens), twin.features(tokens))
                torch.testing.assert_close(model.call_method("scaled", tokens), expected)
                fails(model, "scaled", tokens)
                fails(model, "logits", x)
                fails(model, "gathered", tokens)
                fails(model, "added", x.clone())
                fails(model, "penalty")
                fails(model, "largest")
        with pytest.raises(IndexError):
            model.module(tokens + 6)
        assert all(type(param) is nn.Parameter for param in module.parameters()), "the shards are hidden"
        for called in (model.module, model):
            called(tokens).sum().backward()
        optimizer = torch.optim.AdamW(module.groups(), foreach=True)
        module.learn(optimizer)
        module.restart()
        model.load_full_state_dict(twin.state_dict())
        torch.testing.assert_close(model(tokens), twin(tokens))

    run_ranks(call, RANKS)


class Reads(Text):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.features(tokens))


def test_a_direct_forward_that_reads_a_shard_is_refused():
    def call() -> None:
        model = FSDP(Reads())
        for mode in MODES:
            with mode(), pytest.raises(UserError, match=r"table.weight is used outside"):
                model.module(torch.tensor([[1, 5, 2]]))

    run_ranks(call, RANKS)

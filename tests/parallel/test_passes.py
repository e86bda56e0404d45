"""There is more to training than forward, backward, step: however passes follow each other, ranks learn
what one process learns."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.launch import run_ranks
from dlo_lib.parallel import DDP, FSDP
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer

Loss = Callable[[], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = (
            nn.Linear(5, 9),
            nn.Linear(9, 5, bias=False),
            nn.Parameter(torch.tensor(0.7)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Tied ends, numbers, a layer that is used twice, and one that need not be learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, learns: bool) -> Tensor:
        x = self.embedding(tokens)
        for index in (0, 1, 0, 2):
            x = self.layers[index](x)
        beside = self.layers[3](x)
        return self.head(self.norm(x + (beside if learns else beside.detach())))


def one_backward_for_two_forwards(first: Loss, second: Loss, net: Net) -> None:
    (first() + second()).backward()


def a_backward_for_each_of_two_forwards(first: Loss, second: Loss, net: Net) -> None:
    one, other = first(), second()
    one.backward()
    other.backward()


def the_other_way_round(first: Loss, second: Loss, net: Net) -> None:
    one, other = first(), second()
    other.backward()
    one.backward()


def twice_through_one_graph(first: Loss, second: Loss, net: Net) -> None:
    loss = first()
    loss.backward(retain_graph=True)
    loss.backward()


def evaluation_between_forward_and_backward(first: Loss, second: Loss, net: Net) -> None:
    loss = first()
    with torch.no_grad():
        second()
    loss.backward()


def a_forward_without_a_backward(first: Loss, second: Loss, net: Net) -> None:
    first().backward()
    second()


def a_forward_that_failed(first: Loss, second: Loss, net: Net) -> None:
    first().backward()
    with failing(net.layers[1]), contextlib.suppress(ArithmeticError):
        second()


ORDERS = [
    one_backward_for_two_forwards,
    a_backward_for_each_of_two_forwards,
    the_other_way_round,
    twice_through_one_graph,
    evaluation_between_forward_and_backward,
    a_forward_without_a_backward,
    a_forward_that_failed,
]


@contextlib.contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise ArithmeticError("planted")

    hook = module.register_forward_hook(fail)
    yield
    hook.remove()


def sgd(
    params: object, cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options
) -> torch.optim.Optimizer:
    return cls(params, **options, lr=0.1, momentum=0.9)


def ddp(net: Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DDP(net, bucket_bytes=500, find_unused_parameters=True), sgd(net.parameters())


def stage_2(net: Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ShardedDDP(net, bucket_bytes=500, find_unused_parameters=True)
    return model, ShardedOptimizer(
        model.parameters(), torch.optim.SGD, partition=model.partition, lr=0.1, momentum=0.9
    )


def fsdp(net: Net, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FSDP(net, find_unused_parameters=True, **options)
    return model, sgd(model.parameters())


def fsdp_whole_until_backward(net: Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    return fsdp(net, reshard_after_forward=False)


def fsdp_with_a_larger_share_until_backward(net: Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    return fsdp(net, reshard_after_forward=1)


def in_every_order(wrap: Callable[[Net], tuple[nn.Module, torch.optim.Optimizer]], learners: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net().double()
    twin = copy.deepcopy(net)
    model, optimizer = wrap(net)
    its_optimizer = sgd(twin.parameters())

    def loss(called: nn.Module, of: int, length: int) -> Tensor:
        tokens = torch.randint(7, (2, length), generator=torch.Generator().manual_seed(of))
        return called(tokens, of < learners).square().mean()

    for order in ORDERS:
        for _ in range(2):
            order(lambda: loss(model, rank, 3), lambda: loss(model, rank, 4), net)
            of_all = [
                lambda length=length: sum(loss(twin, of, length) for of in range(ranks)) / ranks
                for length in (3, 4)
            ]
            order(*of_all, twin)
            for each in (optimizer, its_optimizer):
                each.step()
                each.zero_grad()
        learned = model.full_state_dict() if isinstance(model, FSDP) else net.state_dict()
        for name, value in twin.state_dict().items():
            assert (learned[name] - value).abs().max() < 1e-10, f"{order.__name__}: {name}"


@pytest.mark.parametrize(
    ("wrap", "learners"),
    [
        (ddp, 1),
        (stage_2, 1),
        (fsdp, 0),
        (fsdp, 2),
        (fsdp_whole_until_backward, 2),
        (fsdp_with_a_larger_share_until_backward, 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_passes_in_every_order(wrap, learners):
    """Where ranks hold the whole model, one layer may be learned from on some of them alone; units of
    FSDP are for all or none."""
    run_ranks(in_every_order, 2, wrap, learners)


def test_a_part_of_a_model_that_is_called_without_its_wrapper_learns_too():
    def learned(wrap: Callable[[Net], tuple[nn.Module, torch.optim.Optimizer]]) -> Tensor:
        torch.manual_seed(0)
        net = Net().double()
        model, optimizer = wrap(net)
        x = torch.arange(10.0, dtype=torch.float64).view(2, 5) * (1 + dist.get_rank())
        for _ in range(2):
            net.layers[2](x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.full_state_dict() if isinstance(model, FSDP) else net.state_dict()
        return state["layers.2.up.weight"]

    expected = run_ranks(learned, 2, ddp)[0]
    for wrap in (stage_2, fsdp):
        for value in run_ranks(learned, 2, wrap):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)

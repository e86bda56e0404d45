"""What DDP sends and when, what it leaves in ``.grad``, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_lib.base.errors import UserError
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.parallel import DDP

SMALL = {"bucket_bytes": 1000, "first_bucket_bytes": 300}


@contextlib.contextmanager
def events() -> Iterator[list[Any]]:
    """The all-reduces of this rank as they are issued, (elements, bytes) each; a test may note its
    own events between them."""
    real, seen = dist.all_reduce, []

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((tensor.numel(), tensor.numel() * tensor.element_size()))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted):
        yield seen


def net(*sizes: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Linear layers with different parameters on every rank and in every call, as good as
    never equal by chance."""
    torch.manual_seed(len(gc.get_objects()) + 1000 * dist.get_rank())
    layers = [nn.Linear(inside, outside, dtype=dtype) for inside, outside in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def rank_input(rank: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    return torch.randn(3, 4, generator=random, dtype=torch.float64).to(dtype)


def mean_gradients(
    module: nn.Module, loss_of_rank: Callable[[nn.Module, int], Tensor]
) -> list[Tensor | None]:
    """What the twin's gradients are: one process, every rank's loss, the mean."""
    twin = copy.deepcopy(module)
    torch.stack([loss_of_rank(twin, rank) for rank in range(dist.get_world_size())]).mean().backward()
    return [parameter.grad for parameter in twin.parameters()]


def grads(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def close(mine: list[Tensor | None], its: list[Tensor | None]) -> None:
    for one, other in zip(mine, its, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_replicas_start_from_the_first_ranks_parameters_and_buffers():
    def start() -> tuple[dict, float]:
        module = net(4, 3)
        module[0].weight.requires_grad_(False)
        module.register_buffer("saved", torch.randn(3))
        module.register_buffer("constant", torch.randn(3), persistent=False)
        before = module[0].weight.sum().item()
        DDP(module)
        return dict(module.named_parameters()) | dict(module.named_buffers()), before

    (first, mine), (second, its) = run_ranks(start, 2)
    assert mine != its
    assert len(first) == 4
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_first_bucket_is_on_its_way_while_backward_runs():
    class Noted:
        """An all-reduce that tells when it is waited for."""

        def __init__(self, work: dist.Work, seen: list) -> None:
            self.work, self.seen = work, seen

        def wait(self) -> None:
            self.seen.append("wait")
            self.work.wait()

    def order() -> list:
        module = net(4, 9, 9, 9)
        model = DDP(module, **SMALL)
        model(rank_input()).sum().backward()
        with events() as seen:
            issue = dist.all_reduce
            dist.all_reduce = lambda *args, **kwargs: Noted(issue(*args, **kwargs), seen)
            module[0].weight.register_hook(lambda gradient: seen.append("first layer's gradient"))
            model(rank_input()).sum().backward()
            seen.append("backward has returned")
        return seen

    for seen in run_ranks(order, 2):
        buckets = [event for event in seen if isinstance(event, tuple)]
        assert seen.index("first layer's gradient") >= 1, "nothing was sent before the last gradient"
        assert seen.index("wait") > seen.index(buckets[-1]), "backward waited for a bucket on its way"
        assert seen[-1] == "backward has returned", "something was left to do after backward"


def test_buckets_go_in_the_same_order_on_every_rank_whatever_the_order_of_arrival():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, width, dtype=torch.float64) for width in (5, 6, 7, 8))

        def forward(self, x: Tensor) -> Tensor:
            """The graph is built in another order on every rank, and so is walked in another order."""
            order = list(range(4)) if dist.get_rank() == 0 else [2, 0, 3, 1]
            return torch.stack([self.parts[index](x).sum() for index in order]).sum()

    def sent() -> tuple[list, list]:
        module = Branches()
        model = DDP(module, bucket_bytes=0, first_bucket_bytes=0)
        arrivals: list[int] = []
        for part in module.parts:
            part.weight.register_post_accumulate_grad_hook(lambda weight: arrivals.append(len(weight)))
        with events() as seen:
            for _ in range(2):
                model.zero_grad()
                model(rank_input()).backward()
                close(grads(module), mean_gradients(module, lambda twin, rank: twin(rank_input(rank))))
        return arrivals, seen

    (arrivals, sent_first), (other_arrivals, sent_second) = run_ranks(sent, 2)
    assert arrivals != other_arrivals
    assert sent_first == sent_second
    assert len(sent_first) == 2 * 8


def test_after_the_first_pass_buckets_follow_the_order_of_use():
    class Backwards(nn.Module):
        """Registered in the order opposite to that of use."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = (
                nn.Linear(8, 2, bias=False),
                nn.Linear(6, 8, bias=False),
                nn.Linear(4, 6, bias=False),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)))

    def sent() -> list:
        model = DDP(Backwards(), bucket_bytes=0, first_bucket_bytes=0)
        with events() as seen:
            for _ in range(2):
                model(rank_input(dtype=torch.float32)).sum().backward()
        return [elements for elements, _ in seen]

    assert run_ranks(sent, 2) == [[24, 48, 16, 16, 48, 24]] * 2


def test_a_step_sends_each_trained_parameter_once_padded_to_16_bytes_however_many_micro_batches():
    def sent() -> tuple[int, int]:
        module = net(4, 9, 9)
        module[0].bias.requires_grad_(False)
        model = DDP(module, **SMALL)
        with events() as seen:
            with model.no_sync():
                for _ in range(3):
                    model(rank_input()).sum().backward()
            assert not seen, "no_sync sent something"
            model(rank_input()).sum().backward()
        close(grads(module), mean_gradients(module, lambda twin, rank: 4 * twin(rank_input(rank)).sum()))
        return len(seen), sum(size for _, size in seen)

    # 4 x 9, 9 x 9 and 9 elements of 8 bytes; odd counts are filled up by one
    assert run_ranks(sent, 2) == [(2, 8 * (36 + 82 + 10))] * 2


def test_backward_passes_that_are_all_averaged_add_up_too():
    def add() -> None:
        module = net(4, 9, 2)
        for view in (True, False):
            model = DDP(module, gradient_as_bucket_view=view, **SMALL)
            model.zero_grad()
            for _ in range(3):
                model(rank_input()).sum().backward()
            close(grads(module), mean_gradients(module, lambda twin, rank: 3 * twin(rank_input(rank)).sum()))

    run_ranks(add, 2)


def test_gradients_are_views_of_the_buckets_and_take_their_memory_along():
    def storages() -> None:
        module = net(4, 9, 9, dtype=torch.float32)

        def held() -> int:
            """Storages of gradients and buckets: what is not a parameter."""
            known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
            tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
            tensors += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            return len({tensor.untyped_storage().data_ptr() for tensor in tensors} - known)

        gc.disable()  # nothing may have to wait for the collector of reference cycles
        model = DDP(module, keep_buckets=False)
        nothing = held()
        for keep in (False, True):
            for _ in range(2):
                model(rank_input(dtype=torch.float32)).sum().backward()
                assert held() - nothing == 1, "the gradients, all in one bucket, and nothing else"
                model.zero_grad(set_to_none=not keep)
            assert held() - nothing == keep

        model.zero_grad()
        for options, in_backward in (
            ({"keep_buckets": True}, 1),
            ({"gradient_as_bucket_view": False}, 1 + len(grads(module))),
        ):
            model = DDP(module, **options)
            for cut in (False, True, True):  # after the first pass the buckets are cut anew
                model(rank_input(dtype=torch.float32)).sum().backward()
                assert not cut or held() - nothing == in_backward
                model.zero_grad()
            assert held() - nothing == 1, "a bucket that is kept, or is not the gradients, stays"
            del model
            assert held() == nothing, "until its owner goes"

    run_ranks(storages, 1)


def sometimes(module: nn.Module, rank: int) -> Tensor:
    """All ranks use layer 0, only rank 1 uses layer 2, and no rank uses layer 4."""
    x = module[0](rank_input(rank))
    return (module[2](x) if rank == 1 else x).sum()


@pytest.mark.parametrize("view", [True, False])
def test_a_parameter_used_by_some_ranks_is_averaged_and_one_used_by_none_keeps_none(view):
    def unused() -> None:
        module = net(4, 9, 9, 9)
        model = DDP(module, find_unused_parameters=True, gradient_as_bucket_view=view, **SMALL)
        # the hooks of backward are what counts here
        model.forward = lambda rank: sometimes(model.module, rank)
        for _ in range(2):
            model.zero_grad()
            sometimes(module, dist.get_rank()).backward()
            expected = mean_gradients(module, sometimes)
            assert [gradient is None for gradient in expected] == [False] * 4 + [True] * 2
            close(grads(module), expected)

    run_ranks(unused, 3)


def test_a_rank_whose_backward_reaches_nothing_joins_in_finish_grad_sync():
    def idle() -> None:
        module = net(4, 9)
        model = DDP(module, find_unused_parameters=True)
        out = model(rank_input()).sum()
        if dist.get_rank() == 0:
            out.backward()
        model.finish_grad_sync()
        close(
            grads(module),
            mean_gradients(module, lambda twin, rank: twin(rank_input(rank)).sum() * (rank == 0)),
        )
        with events() as seen:
            model.finish_grad_sync()
        assert not seen, "there was nothing left to average"

    run_ranks(idle, 2)


def test_a_missing_gradient_is_named_unless_allowed():
    def forgotten() -> str:
        module = net(4, 9, 9)
        model = DDP(module)
        with pytest.raises(UserError) as caught:
            model.module[0](rank_input()).sum().backward()
        model.zero_grad()
        model(rank_input()).sum().backward()  # and the next step is right
        close(grads(module), mean_gradients(module, lambda twin, rank: twin(rank_input(rank)).sum()))
        return str(caught.value)

    for message in run_ranks(forgotten, 2):
        assert "2.weight, 2.bias" in message
        assert "find_unused_parameters=True" in message


def test_dtypes_travel_apart():
    def mixed() -> tuple[int, list[str]]:
        module = net(4, 9, 9, dtype=torch.float32)
        module[2].to(torch.bfloat16)
        model = DDP(module)

        def loss(model: nn.Module, rank: int) -> Tensor:
            return model[2](model[0](rank_input(rank, torch.float32)).bfloat16()).float().sum()

        with events() as seen:
            loss(module, dist.get_rank()).backward()
        for mine, its in zip(grads(module), mean_gradients(model.module, loss), strict=True):
            torch.testing.assert_close(mine, its, rtol=0.02, atol=0.02)
        return len(seen), [str(gradient.dtype) for gradient in grads(module)]

    assert run_ranks(mixed, 2) == [(2, ["torch.float32"] * 2 + ["torch.bfloat16"] * 2)] * 2


def test_fp16_gradients_do_not_overflow_in_the_sum():
    def large() -> list[float]:
        weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
        module = nn.ParameterList([weight])
        model = DDP(module)
        (weight * (60_000 - 64 * dist.get_rank())).sum().backward()
        assert model.module is module
        return weight.grad.tolist()

    assert run_ranks(large, 2) == [[60_000.0 - 32] * 3] * 2


def test_the_gradient_of_a_parameter_has_its_strides():
    def strided() -> None:
        module = nn.Conv2d(3, 5, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
        model = DDP(module)

        def loss(model: nn.Module, rank: int) -> Tensor:
            return model(rank_input(rank).flatten()[:12].reshape(1, 3, 2, 2).repeat(1, 1, 2, 2)).pow(2).sum()

        loss(model, dist.get_rank()).backward()
        assert module.weight.grad.stride() == module.weight.stride() != module.weight.contiguous().stride()
        close(grads(module), mean_gradients(module, loss))

    run_ranks(strided, 2)


def test_after_an_exception_inside_backward_the_next_step_is_right():
    def interrupted() -> list[bool]:
        module = net(4, 9, 9, 9)
        model = DDP(module, bucket_bytes=0, first_bucket_bytes=0)

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("planted")

        # The ranks fail at different depths, with different numbers of buckets on their way.
        hook = module[4 if dist.get_rank() == 0 else 0].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            model(rank_input()).sum().backward()
        hook.remove()
        model.finish_grad_sync()
        poisoned = [gradient is not None and bool(gradient.isnan().any()) for gradient in grads(module)]
        model.zero_grad()
        model(rank_input()).sum().backward()
        close(grads(module), mean_gradients(module, lambda twin, rank: twin(rank_input(rank)).sum()))
        return poisoned

    first, second = run_ranks(interrupted, 2)
    assert not any(first[:4]), "the first rank failed before it had these"
    assert second == [False, True, True, True, True, False], (
        "what the first rank did not contribute to must not look like an average"
    )


def test_forward_without_gradients_sends_nothing():
    def evaluate() -> None:
        module = net(4, 9)
        module.register_buffer("running", torch.zeros(3))
        model = DDP(module)
        first = model(rank_input()).sum()
        first.backward()
        with mock.patch.object(dist, "broadcast", side_effect=AssertionError), events() as seen:
            with torch.no_grad():
                model(rank_input())
            model.eval()
            model(rank_input())
        assert not seen

    run_ranks(evaluate, 2)


@pytest.mark.parametrize("kept_equal", [True, False])
def test_running_buffers_follow_the_first_rank_once_a_step(kept_equal):
    def running() -> list[list[float]]:
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        module.register_buffer("constant", torch.zeros(1), persistent=False)
        model = DDP(module, broadcast_buffers=kept_equal)
        module.constant += dist.get_rank()
        module[0].running_mean += dist.get_rank()
        seen = []
        handle = module[0].register_forward_pre_hook(
            lambda *_: seen.append(module[0].running_mean.mean().item())
        )
        with model.no_sync():
            model(rank_input())
        model(rank_input()).sum().backward()
        handle.remove()
        assert module.constant.item() == dist.get_rank(), "a constant is not sent again"
        assert module[0].num_batches_tracked.item() == 2
        return seen

    first, second = run_ranks(running, 2)
    assert second[0] == first[0] + 1, "inside no_sync nothing is sent"
    assert (first[1] == second[1]) is kept_equal


def test_reentrant_checkpointing_is_right_where_each_parameter_is_reached_once_and_refused_where_twice():
    def reentrant() -> None:
        module = net(4, 9, 4)

        def once(model: nn.Module, rank: int) -> Tensor:
            x = rank_input(rank).requires_grad_()
            return model[2](checkpoint(model[0], x, use_reentrant=True)).sum()

        def twice(model: nn.Module, rank: int) -> Tensor:
            x = rank_input(rank).requires_grad_()
            for _ in range(2):
                x = checkpoint(lambda x: model[2](model[0](x)), x, use_reentrant=True)
            return (x * model[2].bias).sum()

        model = DDP(module, **SMALL)
        once(module, dist.get_rank()).backward()
        close(grads(module), mean_gradients(module, once))
        model.zero_grad()
        with pytest.raises(UserError, match="use_reentrant=False"):
            twice(module, dist.get_rank()).backward()

    run_ranks(reentrant, 2)


def test_a_checkpoint_does_not_know_about_ddp_and_a_copy_is_refused():
    def states() -> None:
        module = net(4, 9)
        model = DDP(module)
        assert list(model.state_dict()) == list(module.state_dict())
        state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        assert module[0].bias.tolist() == [3.0] * 9
        for make in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(UserError, match=r"copy its \.module"):
                make(model)
        close(grads(copy.deepcopy(model.module)), [None, None])

    run_ranks(states, 1)


def test_wrapping_again_replaces_the_first_wrapper():
    def again() -> int:
        module = net(4, 9)
        model = DDP(module)
        model = DDP(module)  # as when a notebook's cell is run twice
        with events() as seen:
            model(rank_input()).sum().backward()
        close(grads(module), mean_gradients(module, lambda twin, rank: twin(rank_input(rank)).sum()))
        return len(seen)

    assert run_ranks(again, 2) == [1, 1]


def test_a_group_of_some_ranks():
    def halves() -> list[float]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        weight = nn.Parameter(torch.full((1,), float(dist.get_rank())))
        model = DDP(nn.ParameterList([weight]), groups[dist.get_rank() // 2])
        start = weight.item()
        (weight * dist.get_rank()).sum().backward()
        return [start, model.module[0].grad.item()]

    assert run_ranks(halves, 4) == [[0.0, 0.5], [0.0, 0.5], [2.0, 2.5], [2.0, 2.5]]


def test_ranks_with_different_modules_raise():
    def different() -> None:
        DDP(net(4, 9 + dist.get_rank()))

    with pytest.raises(RankFailure, match="differs from the first rank's"):
        run_ranks(different, 2)


def test_misuse_is_named():
    def misuse() -> None:
        module = net(4, 9)
        module[0].bias.requires_grad_(False)
        model = DDP(module)
        module[0].bias.requires_grad_(True)
        with pytest.raises(UserError, match="unfreeze first"):
            model(rank_input())

        table = nn.Embedding(5, 2, sparse=True)
        model = DDP(table)
        with pytest.raises(UserError, match="sparse=False"):
            model(torch.tensor([1])).sum().backward()

    run_ranks(misuse, 1)
    with pytest.raises(UserError, match="run_ranks"):
        DDP(nn.Linear(2, 2))

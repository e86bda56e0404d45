"""What FSDP holds, sends and when, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.models import Llama, model_config
from dlo_lib.optim import train_step
from dlo_lib.parallel import FSDP
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.compile import compile_blocks
from dlo_lib.parallel.fsdp.deferred_init import deferred_init
from dlo_lib.parallel.fsdp.param_group import FSDPParamGroup, ShardedState
from dlo_lib.parallel.grad_scaler import ShardedGradScaler
from dlo_lib.parallel.mesh import inner_group
from dlo_lib.parallel.sharding.transport import CollectiveTransport
from tests.fsdp2 import fully_shard


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks between two ends that are not tied; 5, 7 and 9 rows, which 2 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens() -> Tensor:
    return torch.arange(12).view(2, 6) % 7


def step(model: nn.Module) -> None:
    model(tokens()).square().mean().backward()


def llama(**options: Any) -> Llama:
    torch.manual_seed(0)
    return Llama(model_config("tiny"), **options)


def padded_bytes(module: nn.Module, ranks: int) -> int:
    return sum(
        param.element_size() * -(-len(param) // ranks) * ranks * param[0].numel()
        for param in module.parameters()
    )


@pytest.mark.parametrize("transport", [None, CollectiveTransport()])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_those_of_the_formula_padding_included(ranks, transport):
    def sent(keep: bool) -> tuple[float, int, list[int]]:
        module = Net()
        sizes = [
            padded_bytes(part, ranks)
            for part in (module, module.embed, nn.ModuleList([module.norm, module.head]))
        ]
        model = FSDP(module, reshard_after_forward=not keep, transport=transport)
        for _ in range(2):
            with trace_collectives() as trace:
                step(model)
        assert not trace.unavailable
        return trace.ring_bytes(), trace.count("all_gather"), sizes

    share = (ranks - 1) / ranks
    for ring, gathers, (everything, embedding, end) in run_ranks(sent, ranks, keep=False):
        # Gathered twice, reduced once; the last unit is kept for backward, and that of an
        # embedding reads no weight.
        assert ring == pytest.approx((3 * everything - embedding - end) * share)
        assert transport is None or gathers == 5 + 3
    for ring, gathers, (everything, _, _) in run_ranks(sent, ranks, keep=True):
        assert ring == pytest.approx(2 * everything * share)
        assert transport is None or gathers == 5


@contextlib.contextmanager
def events(model: FSDP, seen: list[tuple[str, str, int]]) -> Iterator[None]:
    """Note in ``seen`` what units do, as (event, unit, how many are then whole or on their way to it)."""

    def noted(method: str) -> Any:
        original = getattr(FSDPParamGroup, method)

        def call(unit: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            before = unit.state
            out = original(unit, *args, **kwargs)
            if unit.state is not before or method == "start_reduce_scatter":
                seen.append(
                    (method, unit.name, sum(other.state is not ShardedState.SHARDED for other in model.units))
                )
            return out

        return mock.patch.object(FSDPParamGroup, method, call)

    with contextlib.ExitStack() as stack:
        for method in ("start_all_gather", "unshard", "reshard", "start_reduce_scatter"):
            stack.enter_context(noted(method))
        yield


@pytest.mark.parametrize("tied", [False, True])
def test_at_most_two_units_are_whole_and_the_next_is_under_way_before_one_ends(tied):
    def order() -> list:
        module = Net()
        if tied:
            module.head.weight = module.embed.weight
        model = FSDP(module)
        seen: list = []
        for index, layer in enumerate(module.layers):
            layer.down.register_forward_hook(
                lambda *_, index=index: seen.append(("compute", f"layers.{index}", 0))
            )
            layer.up.register_full_backward_hook(
                lambda *_, index=index: seen.append(("backward", f"layers.{index}", 0))
            )
        step(model)
        seen.clear()
        with events(model, seen):
            step(model)
        return seen

    for seen in run_ranks(order, 2):
        assert max(whole for _, _, whole in seen) == 2
        moments = [(event, name.split(".up")[0]) for event, name, _ in seen]
        forward, backward = (
            moments[: moments.index(("compute", "layers.2")) + 1],
            moments[moments.index(("compute", "layers.2")) :],
        )
        for index in (0, 1):
            assert forward.index(("start_all_gather", f"layers.{index + 1}")) < forward.index(
                ("compute", f"layers.{index}")
            )
            assert backward.index(("start_all_gather", f"layers.{index}")) < backward.index(
                ("backward", f"layers.{index + 1}")
            )
            assert backward.index(("start_reduce_scatter", f"layers.{index + 1}")) < backward.index(
                ("backward", f"layers.{index}")
            )


def test_a_rank_rests_with_its_share_of_parameters_gradients_and_state():
    def held() -> tuple[int, int]:
        module = llama()
        numel = sum(param.numel() for param in module.parameters())
        model = FSDP(module, keep_buffers=False)
        optimizer = torch.optim.AdamW(model.parameters())
        del module

        def resting() -> int:
            gc.collect()
            tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
            tensors += [param.grad for param in model.parameters() if param.grad is not None]
            tensors += [value for state in optimizer.state.values() for value in state.values()]
            return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

        inputs = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
        return resting(), numel

    for ranks in (1, 2, 4):
        for bytes_held, numel in run_ranks(held, ranks):
            assert bytes_held == pytest.approx(16 * numel / ranks, rel=0.02)


def test_accumulating_without_communication_sends_only_what_forward_and_backward_need():
    def sent() -> list[int]:
        model = FSDP(Net(), transport=CollectiveTransport())
        counts = []
        with trace_collectives() as trace, model.no_sync():
            step(model)
        counts.append(trace.count("reduce_scatter"))
        with trace_collectives() as trace:
            step(model)
        return [*counts, trace.count("reduce_scatter")]

    assert run_ranks(sent, 2) == [[0, 5]] * 2


def test_units_that_are_kept_are_gathered_once_for_all_micro_batches():
    """As in a pipeline, where forwards and backwards of several micro-batches alternate."""

    def gathered() -> tuple[int, set[ShardedState]]:
        model = FSDP(Net(), transport=CollectiveTransport(), reshard_after_forward=False)
        with trace_collectives() as trace:
            with model.no_sync():
                first, second = model(tokens()).sum(), model(tokens()).sum()
                first.backward()
                third = model(tokens()).sum()
                second.backward()
                third.backward()
            model.finish_grad_sync()
        return trace.count("all_gather"), {unit.state for unit in model.units}

    assert run_ranks(gathered, 2) == [(5, {ShardedState.SHARDED})] * 2


@pytest.mark.parametrize(
    ("compute", "reduce"), [(None, None), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_are_those_of_fully_shard(compute, reduce, checkpointing):
    def losses() -> tuple[list[float], list[float]]:
        ours = FSDP(llama(checkpointing=checkpointing), compute_dtype=compute, reduce_dtype=reduce)
        peer = llama(checkpointing=checkpointing)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
        for block in peer.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(peer, mp_policy=policy)
        random = torch.Generator().manual_seed(dist.get_rank())
        batches = [torch.randint(257, (2, 9), generator=random) for _ in range(5)]
        histories = []
        for model in (ours, peer):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            results = [
                train_step(model, optimizer, [(batch[:, :-1], batch[:, 1:])], group=dist.group.WORLD)
                for batch in batches
            ]
            histories.append([result.loss.item() for result in results])
        return histories[0], histories[1]

    for mine, its in run_ranks(losses, 2):
        assert mine[0] != mine[-1]
        assert mine == its, "both round in the same places, so nothing differs"


def test_full_state_goes_round_through_names_that_know_of_no_shards():
    def round_trip() -> None:
        torch.manual_seed(dist.get_rank())
        module = Net()
        module.register_buffer("running", torch.ones(3))
        module.head.weight = module.embed.weight
        names = list(module.state_dict())
        first = copy.deepcopy(module)
        for tensor in [*first.parameters(), *first.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        model = FSDP(module, compute_dtype=torch.bfloat16)
        state = model.full_state_dict()
        assert list(state) == names
        for name, value in first.state_dict().items():
            assert torch.equal(state[name], value), name
        other = FSDP(Net(), inner_group(dist.group.WORLD, 1))
        with pytest.raises(UserError, match="other names than the module: running"):
            other.load_full_state_dict(state)
        changed = {name: value + 1 for name, value in state.items()}
        model.load_full_state_dict(changed)
        assert all(torch.equal(value, changed[name]) for name, value in model.full_state_dict().items())
        assert list(model.state_dict()) == names
        with pytest.raises(UserError, match="full_state_dict"):
            copy.deepcopy(model)
        with pytest.raises(UserError, match="sharded already"):
            FSDP(module)

    run_ranks(round_trip, 3)


def trained(steps: int, folder: str, load: bool, deferred: bool = False) -> dict[str, Tensor]:
    """``steps`` steps of AdamW on data that do not depend on the ranks, saved in between."""
    torch.manual_seed(0)
    if deferred:
        with deferred_init() as recipe:
            module = llama()
        model = FSDP(module, values=recipe.value, device=torch.device("cpu"))
    else:
        model = FSDP(llama().requires_grad_(True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if load:
        load_sharded(folder, model, optimizer)
    for _ in range(steps):
        model(torch.arange(16).view(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not load:
        save_sharded(folder, model, optimizer)
    return model.full_state_dict()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_sharded_checkpoint_is_resumed_on_another_number_of_ranks(tmp_path, before, after):
    through = run_ranks(trained, 1, 4, str(tmp_path / "through"), load=False)[0]
    run_ranks(trained, before, 2, str(tmp_path / "half"), load=False)
    for state in run_ranks(trained, after, 2, str(tmp_path / "half"), load=True):
        for name, value in through.items():
            torch.testing.assert_close(state[name], value)
    with pytest.raises(RankFailure, match="holds no sharded checkpoint"):
        run_ranks(trained, 1, 1, str(tmp_path / "nowhere"), load=True)


def test_a_model_that_is_never_whole_starts_as_the_one_built_whole(tmp_path):
    twin = llama().state_dict()
    for state in run_ranks(trained, 3, 0, str(tmp_path), load=False, deferred=True):
        for name, value in state.items():
            assert torch.equal(value, twin[name]), name


def test_deferred_values_are_drawn_one_by_one_in_any_order_and_leave_the_generator_as_after_building():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 3, padding_idx=2)
            self.drawn = nn.Parameter(torch.randn(5))
            self.register_buffer("ones", torch.ones(4))
            self.conv = nn.Conv2d(2, 3, 3)
            nn.init.kaiming_normal_(self.conv.weight)
            self.last = nn.Linear(3, 3)

    torch.manual_seed(5)
    whole, after = Odd(), torch.rand(1)
    torch.manual_seed(5)
    with deferred_init() as recipe:
        module = Odd()
    assert torch.equal(torch.rand(1), after)
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    for name, tensor in reversed(module.state_dict(keep_vars=True).items()):
        assert torch.equal(recipe.value(tensor), whole.state_dict()[name]), name
    with deferred_init() as recipe:
        forgotten = nn.Parameter(torch.empty(3))
    with pytest.raises(UserError, match="never initialised"):
        recipe.value(forgotten)
    with pytest.raises(UserError, match="not built inside"):
        recipe.value(torch.empty(3, device="meta"))


@pytest.mark.parametrize("first", ["wrapped", "compiled"])
def test_compiled_blocks_learn_the_same_and_share_one_graph(first):
    def learned() -> int:
        graphs = 0

        def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        torch.manual_seed(0)
        module = Net()
        twin = FSDP(copy.deepcopy(module))
        if first == "compiled":
            assert compile_blocks(module, backend=counting) == 3
        model = FSDP(module)
        if first == "wrapped":
            compile_blocks(model, Layer, backend=counting)
        for _ in range(3):
            for network in (model, twin):
                network.zero_grad()
                step(network)
            for mine, its in zip(model.parameters(), twin.parameters()):
                torch.testing.assert_close(mine.grad, its.grad)
            assert all(unit.state is ShardedState.SHARDED for unit in model.units)
        for whole in (lambda: torch.compile(twin, backend="eager")(tokens()), twin.compile):
            with pytest.raises(UserError, match=r"as a whole is not supported.*compile_blocks"):
                whole()
        return graphs

    assert run_ranks(learned, 2) == [1, 1]


def test_there_must_be_something_to_compile():
    with pytest.raises(UserError, match="no blocks"):
        compile_blocks(nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("build", "vocab", "backend"), [(Net, 7, "inductor"), (llama, 257, "aot_eager")])
def test_blocks_compiled_with_their_backward_learn_the_same(build, vocab, backend):
    """Inductor compiles the smaller model: each kernel takes its C++ compiler 3 s. The other backend differs
    only in that it does not fuse kernels."""

    def losses() -> tuple[list[float], list[float]]:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(FSDP(build()))
        compile_blocks(models[1], backend=backend)
        inputs, targets = (
            torch.randint(vocab, (2, 8), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)
        )
        histories = []
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            results = [
                train_step(model, optimizer, [(inputs, targets)], group=dist.group.WORLD) for _ in range(3)
            ]
            histories.append([result.loss.item() for result in results])
        return histories[0], histories[1]

    for mine, its in run_ranks(losses, 2, timeout=300):
        assert mine[0] > mine[-1]
        assert mine == pytest.approx(its, rel=1e-5)


def test_an_overflow_on_one_rank_skips_the_step_of_all():
    def scales() -> tuple[float, float]:
        param = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = ShardedGradScaler("cpu", dist.group.WORLD, init_scale=4.0)
        param.grad = torch.full((2,), 4.0 if dist.get_rank() else torch.inf)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        return param[0].item(), scaler.get_scale()

    assert run_ranks(scales, 2) == [(1.0, 2.0)] * 2


def test_a_missing_gradient_is_named_unless_allowed():
    def forgotten() -> str:
        module = Net()
        model = FSDP(module)
        module.layers[1].forward = lambda x: x + module.layers[1].up(x)[..., :5]
        with pytest.raises(UserError) as caught:
            step(model)
        return str(caught.value)

    for message in run_ranks(forgotten, 2):
        assert "layers.1.down.weight" in message
        assert "find_unused_parameters=True" in message


def test_after_an_exception_inside_backward_the_next_step_is_right():
    def interrupted() -> None:
        torch.manual_seed(0)
        module = Net()
        twin = copy.deepcopy(module)
        model = FSDP(module)

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("planted")

        out = model(tokens())
        unit = next(unit for unit in model.units if unit.name.startswith("layers.1"))
        hook = unit.fsdp_params[0].whole.register_hook(fail)
        with pytest.raises(ArithmeticError):
            out.square().mean().backward()
        hook.remove()
        model.zero_grad()
        step(model)
        step(twin)
        expected = {name: param.grad for name, param in twin.named_parameters()}
        for unit in model.units:
            for fsdp_param in unit.fsdp_params:
                mine = fsdp_param.shard.grad
                rows = -(-len(expected[fsdp_param.name]) // 2)
                torch.testing.assert_close(mine, expected[fsdp_param.name][rows * dist.get_rank() :][:rows])

    run_ranks(interrupted, 2)


def test_shards_and_state_may_live_elsewhere():
    """On a machine with a GPU, parameters compute there; here both are the CPU and the path is the same."""

    def devices() -> set[str]:
        model = FSDP(Net(), shard_device=torch.device("cpu"))
        step(model)
        return {param.device.type for param in model.parameters()} | {
            param.grad.device.type for param in model.parameters()
        }

    assert run_ranks(devices, 2) == [{"cpu"}] * 2


def test_misuse_is_named():
    def misuse() -> None:
        with pytest.raises(UserError, match="groups of 3 do not divide 2 ranks: use 1 or 2"):
            FSDP(Net(), reshard_after_forward=3)
        with pytest.raises(UserError, match="no module is a Conv2d"):
            FSDP(Net(), blocks=nn.Conv2d)
        with pytest.raises(UserError, match="full_state_dict"):
            copy.deepcopy(FSDP(Net()))

    run_ranks(misuse, 2)
    with pytest.raises(UserError, match="run_ranks"):
        FSDP(nn.Linear(2, 2))

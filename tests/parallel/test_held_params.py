"""A module that changes after it was wrapped trains as the unwrapped one does, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.parallel import DDP, FSDP
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.schedules import one_f_one_b
from dlo_lib.parallel.pipeline.tied_embeddings import TiedEmbeddings
from dlo_lib.parallel.tensor.apply import parallelize_tensor
from dlo_lib.parallel.tensor.style import SequenceParallel
from dlo_lib.parallel.tensor.wrapper import TensorParallel
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer
from tests.parallel.forms import Spread

RANKS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.out = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def ddp(module: nn.Module) -> Spread:
    return DDP(module), sgd(module)


def stage_1(module: nn.Module) -> Spread:
    return DDP(module), ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def stage_2(module: nn.Module) -> Spread:
    model = ShardedDDP(module)
    options: dict[str, Any] = {"partition": model.partition, "lr": 0.1, "momentum": 0.9}
    return model, ShardedOptimizer(model.parameters(), torch.optim.SGD, **options)


def fsdp(module: nn.Module) -> Spread:
    model = FSDP(module)
    return model, sgd(model)


FORMS = (ddp, stage_1, stage_2, fsdp)


def weights_of(model: nn.Module, module: nn.Module) -> dict[str, Tensor]:
    return model.full_state_dict() if isinstance(model, FSDP) else dict(module.state_dict())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, part: slice = slice(None)) -> None:
    x = torch.randn(2 * RANKS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    out = model(x[part].to(next(model.parameters()).dtype))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_like_its_twin(
    form: Callable[[nn.Module], Spread],
    change: Callable[[nn.Module], object],
    build: Callable[[], nn.Module] = Net,
) -> None:
    """Change the module and its twin after one step, train both, and compare them."""
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(build().double())
    module, twin = pair
    (model, optimizer), its = form(module), sgd(twin)
    rank = dist.get_rank()
    for step in range(4):
        if step == 1:
            change(module)
            change(twin)
        if step == 3:
            twin.layers[1].requires_grad_(True)
            module.layers[1].requires_grad_(True)
        train(model, optimizer, step, slice(2 * rank, 2 * rank + 2))
        train(twin, its, step)
    for name, value in weights_of(model, module).items():
        torch.testing.assert_close(value, twin.state_dict()[name], msg=f"{form.__name__} {name}: {{}}".format)


def test_freezing_and_thawing_after_wrapping_is_followed():
    def compare() -> None:
        for form in FORMS:
            trained_like_its_twin(form, lambda module: module.layers[1].requires_grad_(False))
            trained_like_its_twin(form, lambda module: module.double() and module.cpu())

    run_ranks(compare, RANKS)


def replaced(module: nn.Module) -> None:
    module.layers[1].weight = nn.Parameter(module.layers[1].weight.detach().clone())


def new_layer(module: nn.Module) -> None:
    module.layers[1] = nn.Linear(6, 6).double()


def adapter(module: nn.Module) -> None:
    module.layers[1].lora = nn.Linear(6, 2).double()


def moved(module: nn.Module) -> None:
    module.layers[1].weight.data = module.layers[1].weight.data * 2


def swapped(module: nn.Module) -> None:
    weight = module.layers[1].weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))


def cast(module: nn.Module) -> None:
    module.bfloat16()


def normed(module: nn.Module) -> None:
    parametrizations.weight_norm(module.layers[1])


def untied(module: nn.Module) -> None:
    module.layers[1].weight = module.layers[2].weight


def without_bias(module: nn.Module) -> None:
    module.layers[1].bias = None


def unfrozen(module: nn.Module) -> None:
    module.out.requires_grad_(True)


CHANGES: dict[Callable[[nn.Module], None], tuple[str, tuple[Callable[[nn.Module], Spread], ...]]] = {
    replaced: ("layers.1.weight.* was added or replaced after .* change the module first", FORMS),
    new_layer: ("was added or replaced after", FORMS),
    adapter: ("layers.1.lora.weight.* was added or replaced", FORMS),
    moved: ("got other memory or another dtype after .* had taken it", FORMS[1:]),
    cast: ("got other memory or another dtype after .* had taken it", FORMS[1:]),
    swapped: ("other memory|no gradient on this rank", FORMS[1:]),
    normed: ("was added or replaced", (fsdp,)),
    untied: ("layers.1.weight was added or replaced|no gradient on this rank for layers.1.weight", FORMS),
    without_bias: ("layers.1.bias was added or replaced|no gradient on this rank for layers.1.bias", FORMS),
    unfrozen: ("unfreeze first, then wrap|was unfrozen: make the optimiser after", FORMS),
}


def test_other_changes_after_wrapping_are_refused():
    def refuse() -> None:
        for change, (sentence, forms) in CHANGES.items():
            for form in forms:
                module = Net().double()
                module.out.requires_grad_(False)
                model, optimizer = form(module)
                train(model, optimizer, 0)
                change(module)
                with pytest.raises(UserError, match=sentence):
                    train(model, optimizer, 1)
                    pytest.fail(f"{form.__name__} trains on after {change.__name__}")

    run_ranks(refuse, RANKS)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def test_running_buffers_are_broadcast_also_after_they_were_replaced():
    def compare() -> None:
        model = DDP(Normed().double())
        model.module.norm.running_mean = torch.zeros(6, dtype=torch.float64)
        model.float().double()
        for _ in range(2):
            model(torch.randn(4, 6, dtype=torch.float64) + dist.get_rank()).sum().backward()
        before = model.module.norm.running_mean.clone()
        model(torch.zeros(4, 6, dtype=torch.float64))
        after = model.module.norm.running_mean / 0.9  # all ranks have taken the values of the first one
        sent = before.clone()
        dist.broadcast(sent, 0)
        torch.testing.assert_close(after, sent)
        assert dist.get_rank() == 0 or not torch.allclose(before, sent)

    run_ranks(compare, RANKS)


def test_parameters_that_are_put_into_the_groups_by_hand_are_refused():
    def refuse() -> None:
        for form in (stage_1, stage_2):
            for change in (
                lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(2))),
                lambda groups: groups[0]["params"].pop(),
                lambda groups: groups.append({"params": [groups[0]["params"].pop()], "lr": 0.1}),
            ):
                model, optimizer = form(Net().double())
                train(model, optimizer, 0)
                change(optimizer.param_groups)
                with pytest.raises(UserError, match=r"param_groups were changed.* add_param_group"):
                    train(model, optimizer, 1)

    run_ranks(refuse, RANKS)


def test_a_module_that_is_taken_out_or_used_twice_trains_as_without_fsdp():
    def out(module: nn.Module) -> None:
        module.layers[2] = nn.Identity()

    def twice(module: nn.Module) -> None:
        module.layers[0] = module.layers[2]

    def compare() -> None:
        for change in (out, twice):
            trained_like_its_twin(fsdp, change)
        model = FSDP(Net())
        out(model.module)
        model.load_full_state_dict(model.full_state_dict())

    run_ranks(compare, RANKS)


def test_stages_that_change_after_the_pipeline_was_made_are_refused():
    def step(model: Pipeline, dtype: torch.dtype) -> None:
        x = torch.ones(1, 6, dtype=dtype)
        model.accumulate_gradients([(x, x)], lambda out, target: (out - target).square().sum())

    def narrower() -> None:
        rank = dist.get_rank()
        model = Pipeline({rank: nn.Linear(6, 6).double()}, one_f_one_b(RANKS, 1))
        step(model, torch.float64)
        model.float()
        if rank == 0:
            with pytest.raises(UserError, match=r"float32 \(1, 6\), and torch.float64 \(1, 6\) before: cast"):
                step(model, torch.float32)

    def untied_table() -> None:
        stage = nn.Linear(6, 6)
        tied = TiedEmbeddings(stage.weight, (0, 1), name="weight")
        model = Pipeline({dist.get_rank(): stage}, one_f_one_b(RANKS, 1), tied=tied)
        step(model, torch.float32)
        stage.weight = nn.Parameter(stage.weight.detach().clone())
        with pytest.raises(UserError, match=r"the copy of weight was replaced .* change the stages first"):
            step(model, torch.float32)

    def cut_layers() -> None:
        module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        model = TensorParallel(
            module, parallelize_tensor(module, dist.group.WORLD, {"1": SequenceParallel()})
        )
        model(torch.ones(1, 6))
        module[1].weight = nn.Parameter(torch.ones(6))
        with pytest.raises(UserError, match=r"1.weight was added or replaced after TensorParallel"):
            model(torch.ones(1, 6))

    def change() -> None:
        untied_table()
        cut_layers()
        narrower()

    run_ranks(change, RANKS)


def test_new_modules_without_parameters_are_no_change():
    def compare() -> None:
        class Around(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        def around(module: nn.Module) -> None:
            module.layers[2] = Around(module.layers[2])

        for form in FORMS:
            torch.manual_seed(0)
            module = Net().double()
            model, optimizer = form(module)
            around(module)
            train(model, optimizer, 0)

    run_ranks(compare, RANKS)


def test_hooks_of_the_user_see_whole_parameters():
    """Old ``weight_norm`` and ``spectral_norm`` compute the weight in a hook before forward."""

    def build() -> nn.Module:
        net = Net()
        nn.utils.weight_norm(net.layers[0])
        nn.utils.spectral_norm(net.layers[2])
        net.inp.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.square().sum(),))
        return net

    def compare() -> None:
        for form in (ddp, fsdp):
            trained_like_its_twin(form, lambda module: None, build)

    run_ranks(compare, RANKS)


class Reads(nn.Module):
    """The head uses the weight of the embedding outside of its forward; ``twice`` uses one of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(6, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 6))
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = layer(h)
        assert self.table.weight.shape == (6, 6)
        return h @ self.table.weight.T

    def twice(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return 2 * x * self.scale


def test_a_parameter_that_is_used_outside_of_its_modules_forward_is_refused_or_whole():
    def use() -> None:
        torch.manual_seed(0)
        module = Reads().double()
        twin = copy.deepcopy(module)
        model = FSDP(module)
        x = torch.randn(3, 6, dtype=torch.float64)
        with pytest.raises(UserError, match=r"table.weight is used outside of the forward.*call_method"):
            model(x)
        assert module.table.weight.shape == (3, 6), "the optimiser has the shards"
        (twin.twice(x).square().sum() / RANKS).backward()
        torch.testing.assert_close(model.call_method("twice", x), twin.twice(x))
        with pytest.raises(UserError, match="scale is used outside of the forward"):
            (module.scale * x[: len(module.scale)]).sum().backward()

    run_ranks(use, RANKS)


class Potential(nn.Module):
    """An energy and its forces."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.out = nn.Linear(6, 1)

    def energy(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, forces], dim=1)


def test_the_gradient_of_an_input_inside_the_forward_is_that_of_the_unwrapped_model():
    def compare() -> None:
        for form in (*FORMS, lambda module: (model := FSDP(module, reshard_after_forward=False), sgd(model))):
            trained_like_its_twin(form, lambda module: None, Potential)
        module = Net().double()  # a gradient penalty, outside of the forward
        twin, model = copy.deepcopy(module), FSDP(module)
        twin.load_state_dict(model.full_state_dict())
        x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        for called in (model, twin):
            (slope,) = torch.autograd.grad(called(x).sum(), x, create_graph=True)
            (called(x).square().mean() + slope.square().sum()).backward()
        for unit in model.units:
            for param in unit.fsdp_params:
                whole = dict(twin.named_parameters())[param.name].grad
                rows = -(-len(whole) // RANKS)
                torch.testing.assert_close(param.shard.grad, whole[rows * dist.get_rank() :][:rows])

    run_ranks(compare, RANKS)


def test_embeddings_that_rewrite_their_weight_are_refused():
    def refuse() -> None:
        for form in FORMS:
            for kind in (nn.Embedding, nn.EmbeddingBag):
                with pytest.raises(UserError, match=r"0 has max_norm=1.0.* leave max_norm out"):
                    form(nn.Sequential(kind(4, 2, max_norm=1.0)))

    run_ranks(refuse, RANKS)


def test_buffers_of_every_dtype_get_the_values_of_the_first_rank():
    def share() -> None:
        dtypes = [torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.int64]
        for form in (ddp, stage_2, fsdp):
            module = Net()
            for number, dtype in enumerate(dtypes):
                module.register_buffer(f"b{number}", torch.full((3,), float(1 - dist.get_rank())).to(dtype))
            model, _ = form(module)
            model(torch.ones(1, 6))
            for number in range(len(dtypes)):
                assert getattr(module, f"b{number}").to(torch.complex64).real.tolist() == [1, 1, 1]

    run_ranks(share, RANKS)


def test_a_copy_of_a_module_inside_fsdp_is_refused():
    def refuse() -> None:
        module = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
        FSDP(module)
        for part in (module, module[0], module[0][0]):
            with pytest.raises(UserError, match=r"cannot be copied or pickled.*full_state_dict\(\)"):
                copy.deepcopy(part)

    run_ranks(refuse, RANKS)


class Lion(torch.optim.Optimizer):
    """Elementwise, and unknown to the library."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.sign(param.grad), alpha=-group["lr"])


class Lars(Lion):
    """The norm of a parameter scales its update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-float(group["lr"] * param.norm()))


class OverRanks(Lars):
    updates_shards = True


MATRICES = [Lars, torch.optim.Adafactor, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else [])]


def test_optimisers_that_need_whole_matrices_are_refused_on_shards_before_they_step():
    def step() -> None:
        model = FSDP(nn.Sequential(nn.Linear(4, 4, bias=False)))
        for kind in (Lion, OverRanks, *MATRICES):
            optimizer = kind(model.parameters(), lr=0.1)
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
            model(torch.ones(1, 4)).sum().backward()
            before = [param.detach().clone() for param in model.parameters()]
            if kind not in MATRICES:
                optimizer.step()
                continue
            for _ in range(2):
                with pytest.raises(UserError, match=rf"{kind.__name__} does not update each element"):
                    optimizer.step()
            assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before))
        alone = FSDP(nn.Linear(4, 4), dist.new_subgroups(1)[0])  # a rank with all rows
        alone(torch.ones(1, 4)).sum().backward()
        Lars(alone.parameters()).step()

    run_ranks(step, RANKS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_in_fp16_does_not_overflow_before_it_is_divided(ranks):
    def mean() -> float:
        module = nn.Linear(1, 1, bias=False)
        model = FSDP(module, compute_dtype=torch.float16, reduce_dtype=torch.float16)
        with model.no_sync():
            model(torch.full((1, 1), 10000.0)).sum().backward()
        model(torch.full((1, 1), 20000.0)).sum().backward()
        return sum(param.grad.sum().item() for param in model.parameters())

    assert run_ranks(mean, ranks) == [30000.0] * ranks

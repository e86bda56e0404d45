"""What travels, when and how much; what a rank stores; checkpoints between degrees; what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.comm.tracing.trace import Trace
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, MoELayer, model_config
from dlo_lib.models.moe import moe_layers
from dlo_lib.optim import train_step
from dlo_lib.parallel import DDP
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.expert import ExpertParallel, parallelize_experts
from dlo_lib.parallel.mesh import Degrees, ParallelMesh
from dlo_lib.parallel.protocol import ParallelModel, SplitDim
from tests.models.moe_twin import dense_moe
from tests.models.test_moe import CONFIGS, HIDDEN, layer_of, weights_of
from tests.parallel.expert.forms import adamw, distributed, llama, micro_batches, whole

TOKENS = (7, 0, 4, 1)
"""Of each rank; one has none."""


def piece(rank: int) -> Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.rand(TOKENS[rank], HIDDEN, dtype=torch.float64, generator=random)


def a_layer(world_size: int, name: str, collapsed: bool) -> None:
    """Outputs and gradients of one layer equal those of masks over the tokens of all ranks."""
    rank, config = dist.get_rank(), CONFIGS[name]
    alone, layer = layer_of(config), layer_of(config)
    if collapsed:  # all tokens choose experts 0 and 1, so that only rank 0 receives rows
        for each in (alone, layer):
            with torch.no_grad():
                each.router.weight.copy_(torch.linspace(0.2, 0, 6)[:, None].expand(6, HIDDEN))
    x = piece(rank).requires_grad_()
    pieces = [piece(other).requires_grad_() for other in range(world_size)]
    outputs, losses, load = dense_moe(weights_of(alone), config, pieces)
    (sum(out.square().sum() for out in outputs) + losses).backward()

    parallelize_experts(layer)
    out = layer(x)
    (world_size * out.square().sum()).backward()  # as ``train_step`` scales it, for the average of gradients
    torch.testing.assert_close(out, outputs[rank], rtol=0, atol=1e-12)
    assert layer.stats is not None
    assert layer.stats.load.tolist() == load.tolist()
    first = rank * config.num_experts // world_size
    expected = {name: param.grad for name, param in alone.named_parameters()}
    for name, param in layer.named_parameters():
        grad, whole_grad = param.grad, expected[name]
        assert grad is not None
        assert whole_grad is not None
        if name.startswith("experts"):
            whole_grad = whole_grad[first : first + len(grad)]
        else:
            dist.all_reduce(grad)
        torch.testing.assert_close(grad / world_size, whole_grad, rtol=0, atol=1e-10)


def layers(world_size: int) -> None:
    for name, collapsed in (("top-2", False), ("shared", True), ("capacity", False)):
        a_layer(world_size, name, collapsed)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_tokens_and_ranks_without_rows(world_size):
    run_ranks(layers, world_size, world_size)


def rows_away(layer: MoELayer, x: Tensor, ep: int) -> int:
    """The number of choices of ``x`` whose expert is on another rank, from the router alone."""
    experts, *_ = layer.router(x.reshape(-1, x.shape[-1]))
    owner = experts // (len(layer.router.weight) // ep)
    return int((owner != dist.get_rank() % ep).sum())


def sent_elements(trace: Trace) -> list[int]:
    """The elements that leave this rank in each all-to-all of rows."""
    rank = dist.get_rank()
    calls = [event.call for event in trace.select(Kind.ALL_TO_ALL) if event.call.dtype == "float64"]
    return [
        sum(count for member, count in zip(call.members, call.send_splits) if member != rank)
        for call in calls
    ]


def traffic(ep: int, checkpointing: bool) -> None:
    torch.manual_seed(0)
    layer = layer_of(CONFIGS["shared"])
    mesh = ParallelMesh(Degrees(dp_shard=0, ep=ep))
    group = mesh.group_along("ep")
    replicas = mesh.group_along("dp_replicate", "dp_shard_mod_ep")
    parallelize_experts(layer, group, replicas=replicas, batch=mesh.group_along("dp_shard"))
    x = torch.randn(
        3, 8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    away = rows_away(layer, x, ep)
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(ep)]
    dist.all_gather(counts, torch.tensor(away), group=group)
    x.requires_grad_()
    with trace_collectives() as trace:
        call = (
            functools.partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False)
            if checkpointing
            else layer
        )
        out = call(x)
        out.sum().backward()
    sent = sent_elements(trace)
    forward = 2 if checkpointing else 1
    assert len(sent) == 2 * forward + 2
    # Over all ranks, each exchange sends top_k * tokens * hidden elements times the share that leaves.
    totals = torch.tensor(sent)
    dist.all_reduce(totals, group=group)
    assert totals.tolist() == [int(sum(counts)) * HIDDEN] * len(sent)
    # Of this rank: its rows in the dispatch, and their gradients; the received rows in the two others.
    assert sent[0] == away * HIDDEN
    assert sent[2 * forward] == away * HIDDEN
    assert sent[1] == sent[-1]
    small = [event.call for event in trace.events if event.call.dtype == "int64"]
    each_forward = [(Kind.ALL_TO_ALL, 6), (Kind.ALL_REDUCE, 6)]
    assert [(call.kind, call.numel) for call in small] == each_forward * forward
    assert len(trace.events) == len(sent) + len(small)


@pytest.mark.parametrize(("world_size", "ep", "checkpointing"), [(2, 2, False), (3, 3, True), (4, 2, False)])
def test_what_a_layer_sends(world_size, ep, checkpointing):
    run_ranks(traffic, world_size, ep, checkpointing)


def overlap() -> None:
    layer = layer_of(CONFIGS["shared"])
    parallelize_experts(layer)
    assert isinstance(layer.shared, nn.Module)

    def mark() -> None:
        dist.all_reduce(torch.zeros(1, dtype=torch.int32))

    layer.shared.register_forward_hook(lambda *_: mark())
    layer.shared.get_submodule("gate_proj").weight.register_hook(lambda _: mark())
    x = torch.randn(6, HIDDEN, dtype=torch.float64, requires_grad=True)
    with trace_collectives() as trace:
        layer(x).sum().backward()
    marks = [event.issued for event in trace.events if event.call.dtype == "int32"]
    rows = [event for event in trace.select(Kind.ALL_TO_ALL) if event.call.dtype == "float64"]
    in_flight = [[event.issued < at < (event.waited_from or 0.0) for event in rows] for at in marks]
    assert in_flight == [[True, False, False, False], [False, False, False, True]]


def test_the_shared_expert_computes_while_rows_travel():
    run_ranks(overlap, 2)


def stored(ep: int) -> None:
    module = llama("drop-less top-2")
    before = {name: param.numel() for name, param in module.named_parameters()}
    model = distributed(module, ep)
    assert isinstance(model, ParallelModel)
    for name, param in model.named_parameters():
        share = ep if ".experts." in name else 1
        assert param.numel() * share == before[name]
        assert param.untyped_storage().nbytes() == param.numel() * 8, "the memory of all experts is kept"
    for shard in model.shards():
        assert shard.shape.numel() == before[shard.name]
        expected = (SplitDim(0, model.layout.group),) if ".experts." in shard.name else ()
        assert shard.placement == expected
    optimizer = adamw(model)
    train_step(model, optimizer, micro_batches(0, dist.get_rank()), group=dist.group.WORLD)
    held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert held == sum(count // (ep if ".experts." in name else 1) for name, count in before.items())


@pytest.mark.parametrize(("world_size", "ep"), [(2, 2), (4, 2)])
def test_a_rank_stores_its_experts_only(world_size, ep):
    run_ranks(stored, world_size, ep)


def saved(folder: Path, ep: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = llama("balance bias")
    model = distributed(module, ep)
    optimizer = adamw(model)
    for step in range(2):
        train_step(model, optimizer, micro_batches(step, dist.get_rank()), group=dist.group.WORLD)
    save_sharded(folder, model, optimizer)
    names = {param: name for name, param in model.named_parameters()}
    moments = [(names[param], state["exp_avg"]) for param, state in optimizer.state.items()]
    full = model.full_state_dict()
    for name, value in whole(list(model.named_parameters()), model).items():
        assert torch.equal(full[name], value)
    return full, whole(moments, model)


def loaded(folder: Path, ep: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(7)
    model = distributed(llama("balance bias"), ep)
    optimizer = adamw(model)
    load_sharded(folder, model, optimizer)
    names = {param: name for name, param in model.named_parameters()}
    moments = [(names[param], state["exp_avg"]) for param, state in optimizer.state.items()]
    return model.full_state_dict(), whole(moments, model)


def test_a_checkpoint_re_shards_between_degrees(tmp_path):
    (full, moments), *_ = run_ranks(saved, 4, tmp_path, 2)
    for world_size, ep in ((1, 1), (3, 3), (2, 1)):
        for its, its_moments in run_ranks(loaded, world_size, tmp_path, ep):
            torch.testing.assert_close(its, full, rtol=0, atol=0)
            torch.testing.assert_close(its_moments, moments, rtol=0, atol=0)


def from_a_full_state() -> None:
    torch.manual_seed(3)
    alone = llama("drop-less top-2")
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    torch.manual_seed(4)
    model = distributed(llama("drop-less top-2"), 2)
    model.load_full_state_dict(state)
    torch.testing.assert_close(model.full_state_dict(), state, rtol=0, atol=0)
    tokens = torch.arange(10).view(2, 5)
    torch.testing.assert_close(model(tokens), alone(tokens), rtol=0, atol=1e-12)
    state["layers.0.mlp.experts.down"] = state["layers.0.mlp.experts.down"][:6]
    with pytest.raises(UserError, match="experts.down is .6, 6, 16. instead of .12, 6, 16."):
        model.load_full_state_dict(state)


def test_the_state_of_one_process_loads_and_gives_its_logits():
    run_ranks(from_a_full_state, 2)


def without_dropping_the_sum(ep: int) -> None:
    """A ``no_sync`` pass communicates tokens, and no gradients of parameters."""
    model = distributed(llama("drop-less top-2"), ep)
    (tokens, _), *_ = micro_batches(0, dist.get_rank())
    with trace_collectives() as trace, model.no_sync():
        model(tokens).sum().backward()
    assert {event.call.dtype for event in trace.select(Kind.ALL_REDUCE)} == {"int64"}
    with trace_collectives() as trace:
        model(tokens).sum().backward()
    summed = [event.call for event in trace.select(Kind.ALL_REDUCE) if event.call.dtype == "float64"]
    sizes = {call.members: call.numel for call in summed}
    experts = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    others = sum(param.numel() for param in model.parameters()) - experts
    everyone = tuple(range(4))
    holders = (dist.get_rank() % 2, dist.get_rank() % 2 + 2)
    assert sizes.keys() == {everyone, holders}
    assert others <= sizes[everyone] < others + 100  # and padding
    assert experts <= sizes[holders] < experts + 100


def test_gradients_are_summed_over_the_ranks_that_hold_the_parameter():
    run_ranks(without_dropping_the_sum, 4, 2)


def refusals() -> None:
    def cut(build: Callable[[], nn.Module], **groups: dist.ProcessGroup) -> str:
        with pytest.raises(UserError) as refused:
            parallelize_experts(build(), **groups)
        return str(refused.value)

    def of(experts: int, **factory: str) -> Llama:
        config = model_config("tiny-moe")
        assert config.moe is not None
        return Llama(replace(config, moe=replace(config.moe, num_experts=experts)), **factory)

    assert cut(lambda: of(8)) == "ep 3 does not divide the 8 experts of layers.1.mlp: use ep 1, 2, 4 or 8"
    assert cut(lambda: Llama(model_config("tiny"))).startswith("the model has no mixture-of-experts layer")
    one = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    world = dist.group.WORLD
    assert world is not None
    assert "give replicas, the ranks with the same experts" in cut(lambda: of(9), group=one, batch=world)
    text = cut(lambda: of(9), group=one, replicas=one, batch=world)
    assert text == (
        "ep 1 x 1 ranks with the same experts makes 1 of 3 ranks with different data: use 3 for each expert"
    )
    model = of(9)
    layout = parallelize_experts(model)
    with pytest.raises(UserError, match="cut already"):
        parallelize_experts(model)
    with pytest.raises(UserError, match="would mix the gradients of different experts"):
        ExpertParallel(DDP(model), layout)
    wrapped = DDP(model, reduced_over=layout.reduced_over(model))
    with pytest.raises(UserError, match="give all ranks equal numbers of batches"), wrapped.join():
        pass
    on_meta = of(9, device="meta")
    parallelize_experts(on_meta)
    assert moe_layers(on_meta)[0].experts.gate_up.shape[0] == 3


def test_what_does_not_fit_is_refused():
    run_ranks(refusals, 3)


def test_without_a_process_group():
    with pytest.raises(UserError, match="expert parallelism needs a process group"):
        parallelize_experts(llama("drop-less top-2"))

"""Llama, GPT-2 and ViT of transformers with tensor and sequence parallelism learn what one process learns,
step by step; another plan resumes their checkpoints, and transformers loads the whole state.

All ranks are those of one launch, because each rank needs seconds to import transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama
from dlo_lib.models.checkpoint import save_checkpoint
from dlo_lib.optim.step import summed_cross_entropy
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.mesh import ParallelMesh
from dlo_lib.parallel.parallelize import parallelize
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.tensor import TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.style import ColumnParallel, RowParallel, ShardedHeads, SharedInput
from dlo_lib.parallel.tensor.styles import llama_styles
from tests.parallel.tensor.stock_models import CONFIG, GPT2, LLAMA, STOCK, Stock, gpt2_of_transformers

STEPS = 4
MAX_NORM = 0.5


def batches(stock: Stock, step: int, copies: range) -> tuple[Tensor, Tensor]:
    made = [stock.batch(torch.Generator().manual_seed(100 * step + copy)) for copy in copies]
    inputs, targets = zip(*made)
    return torch.cat(inputs), torch.cat(targets)


def trained_alone(stock: Stock) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Of one process with the data of both copies: losses, gradient norms, and the final state."""
    model = stock.model(0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = batches(stock, step, range(2))
        loss = F.cross_entropy(model(inputs).logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    assert max(norms) > MAX_NORM, "nothing was clipped"
    return losses, norms, model.state_dict()


def trained(
    stock: Stock, plan: ParallelPlan, first: int, last: int, folder: Path
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train steps ``first`` to ``last``, from the checkpoint in ``folder`` unless this is the beginning, and
    write a checkpoint there."""
    mesh = ParallelMesh(plan.degrees)
    model = stock.model(0.0).train()
    kind = type(model)
    spread = parallelize(model, plan, mesh, styles=stock.styles)
    assert type(model) is kind
    if plan.tp > 1:
        linears = sum(isinstance(style, (ColumnParallel, RowParallel)) for style in stock.styles.values())
        cut = [shard for shard in spread.shards() if shard.placement[0].copies == 1]
        assert len(cut) >= linears > 0, "weights that should be cut are whole"
    optimizer = torch.optim.AdamW(spread.parameters(), lr=1e-2)
    if first:
        load_sharded(folder / str(first), spread, optimizer)
    losses, norms = [], []
    copies_group = mesh.group_along("dp_shard")
    copy, copies = mesh.coordinate("dp_shard"), mesh.size("dp_shard")
    ours = range(2) if copies == 1 else range(copy, copy + 1)
    for step in range(first, last):
        inputs, targets = batches(stock, step, ours)
        logits = spread(inputs).logits.view(*targets.shape, -1)
        loss_of = getattr(spread, "summed_cross_entropy", summed_cross_entropy)
        loss = loss_of(logits, targets) / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        spread.finish_grad_sync()
        norms.append(float(spread.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        loss = loss.detach() / copies
        dist.all_reduce(loss, group=copies_group)
        losses.append(float(loss))
    save_sharded(folder / str(last), spread, optimizer)
    return losses, norms, spread.full_state_dict()


PLANS = [
    ParallelPlan(tp=2),
    ParallelPlan(dp_shard=2),
    ParallelPlan(tp=2, sequence_parallel=True),
    ParallelPlan(tp=2, sequence_parallel=True, async_tp=True),
]


def resumed_by_each_plan(folder: Path) -> dict[str, tuple[list[float], list[float], dict[str, Tensor]]]:
    """Each plan trains one step of each model, from the checkpoint of the plan before."""
    torch.set_num_threads(1)
    found = {}
    for name, stock in STOCK.items():
        history: tuple[list[float], list[float], dict[str, Tensor]] = ([], [], {})
        for step, plan in enumerate(PLANS):
            losses, norms, state = trained(stock, plan, step, step + 1, folder / name)
            history = (history[0] + losses, history[1] + norms, state)
        found[name] = history
    return found


def check_gradients(stock: Stock, sequence_parallel: bool) -> None:
    """Logits, loss and gradients of a model that is cut over two ranks."""
    inputs, targets = batches(stock, 0, range(2))
    twin = stock.model(0.0)
    logits = twin(inputs).logits
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    loss.backward()
    model = stock.model(0.0)
    plan = ParallelPlan(tp=2, sequence_parallel=sequence_parallel)
    spread = parallelize(model, plan, ParallelMesh(plan.degrees), styles=stock.styles)
    assert isinstance(spread, TensorParallel)
    layout = spread.layout
    found = spread(inputs).logits
    part = logits if layout.head is None else logits.narrow(-1, layout.head[0], found.shape[-1])
    torch.testing.assert_close(found, part, atol=1e-10, rtol=0)
    found_loss = spread.summed_cross_entropy(found.view(*targets.shape, -1), targets)
    torch.testing.assert_close(found_loss, loss, atol=1e-10, rtol=0)
    found_loss.backward()
    spread.finish_grad_sync()
    for name, param in model.named_parameters():
        whole = twin.get_parameter(name.replace(".inner.", ".")).grad
        torch.testing.assert_close(param.grad, layout.parts[name].of(whole), atol=1e-10, rtol=0, msg=name)


ATTENTIONS = {
    "GPT-2": ("transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj"),
    "Llama": ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj"),
    "ViT": ("vit.layers.1.attention.q_proj", "vit.layers.1.attention.o_proj"),
}
"""The linears between which a rank computes on its heads."""

DROPOUTS = {"GPT-2": "transformer.h.1.mlp.dropout", "ViT": "vit.layers.1.dropout"}
"""A dropout between the pairs of linears. The Llama has none."""


def check_dropout(name: str, sequence_parallel: bool, group: dist.ProcessGroup) -> None:
    """Random numbers differ between two ranks while they compute on their heads, and in a dropout on parts of
    the sequence; they are equal elsewhere."""
    stock = STOCK[name]
    model = stock.model(0.5).train()
    layout = parallelize_tensor(model, group, stock.styles, sequence_parallel=sequence_parallel)
    drawn: dict[str, Tensor] = {}

    def draw(place: str) -> Callable[..., None]:
        def record(*_: Any) -> None:
            state = torch.get_rng_state()
            drawn[place] = torch.rand(4)
            torch.set_rng_state(state)

        return record

    first, last = (model.get_submodule(linear) for linear in ATTENTIONS[name])
    first.register_forward_hook(draw("heads"))
    last.register_forward_pre_hook(draw("after"))
    if name in DROPOUTS:
        dropout = model.get_submodule(DROPOUTS[name])
        inside = dropout.inner if sequence_parallel else dropout
        inside.register_forward_pre_hook(draw("dropout"))
    torch.manual_seed(1)
    spread, (inputs, _) = TensorParallel(model, layout), batches(stock, 0, range(1))
    without = spread.eval()(inputs).logits
    assert not torch.equal(spread.train()(inputs).logits, without), "nothing was dropped"
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, drawn, group=group)
    differ = {place: not torch.equal(gathered[0][place], gathered[1][place]) for place in drawn}
    assert differ == {
        place: place == "heads" or (place == "dropout" and sequence_parallel) for place in drawn
    }


def check_refusals(group: dist.ProcessGroup) -> None:
    linear = nn.Linear(4, 10)
    with pytest.raises(UserError, match="0 has 10 features, which are not 3 equal sections"):
        parallelize_tensor(nn.Sequential(linear), group, {"0": ColumnParallel(sections=3)})
    gathers = ColumnParallel(sections=2, gather_output=True)
    with pytest.raises(UserError, match="sections of 0 are not gathered in order: leave gather_output out"):
        parallelize_tensor(nn.Sequential(linear), group, {"0": gathers})
    with pytest.raises(UserError, match="h.0.attn: give c_attn the style ColumnParallel"):
        parallelize_tensor(
            gpt2_of_transformers(),
            group,
            {"transformer.h.*.attn": ShardedHeads("c_attn", "c_proj")},
        )
    attention = "model.layers.*.self_attn"
    columns = {f"{attention}.{name}_proj": ColumnParallel() for name in "qkv"}
    shared = SharedInput(("q_proj", "k_proj", "v_proj"), last="o_proj")
    with pytest.raises(UserError, match="self_attn: give o_proj the style RowParallel before SharedInput"):
        parallelize_tensor(LLAMA.model(0.0), group, {**columns, attention: shared})
    odd = parallelize_tensor(model := LLAMA.model(0.0), group, LLAMA.styles, sequence_parallel=True)
    with pytest.raises(
        UserError, match="a sequence of 7 is not a multiple of tp 2: use tp 1 or 7, or sequences of 6"
    ):
        TensorParallel(model, odd)(torch.zeros(1, 7, dtype=torch.int64))


def on_each_rank(folder: Path) -> dict[str, tuple[list[float], list[float], dict[str, Tensor]]]:
    group = dist.group.WORLD
    assert group is not None
    for sequence_parallel in (False, True):
        for name, stock in STOCK.items():
            check_gradients(stock, sequence_parallel)
            check_dropout(name, sequence_parallel, group)
    check_refusals(group)
    return resumed_by_each_plan(folder)


def test_stock_models_learn_what_one_process_learns(tmp_path):
    twins = {name: trained_alone(stock) for name, stock in STOCK.items()}
    for rank in run_ranks(on_each_rank, 2, tmp_path):
        for name, (losses, norms, state) in rank.items():
            twin_losses, twin_norms, twin_state = twins[name]
            assert losses == pytest.approx(twin_losses, rel=1e-10, abs=0), name
            assert norms == pytest.approx(twin_norms, rel=1e-9, abs=0), name
            for key, value in twin_state.items():
                torch.testing.assert_close(state[key], value, atol=1e-8, rtol=0)
    again = gpt2_of_transformers()
    again.load_state_dict(state_of_gpt2 := rank["GPT-2"][2])
    again.save_pretrained(tmp_path / "exported")
    loaded = type(again).from_pretrained(tmp_path / "exported", dtype=torch.float64).eval()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state_of_gpt2[name])
    inputs, _ = batches(GPT2, 0, range(1))
    torch.testing.assert_close(loaded(inputs).logits, again.eval()(inputs).logits, atol=1e-12, rtol=0)


def exported(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(2)
    model = Llama(CONFIG)
    assert dist.group.WORLD is not None
    layout = parallelize_tensor(model, dist.group.WORLD, llama_styles(CONFIG), sequence_parallel=True)
    state = TensorParallel(model, layout).full_state_dict()
    if dist.get_rank() == 0:
        whole = Llama(CONFIG)
        whole.load_state_dict(state)
        save_checkpoint(whole, folder)
    return state


def test_the_whole_state_loads_in_transformers(tmp_path):
    import transformers

    states = run_ranks(exported, 4, tmp_path)
    torch.manual_seed(2)
    own = Llama(CONFIG)
    for name, value in own.state_dict().items():
        assert all(torch.equal(state[name], value) for state in states)
    tokens = torch.arange(8).view(1, 8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(theirs(tokens).logits, own(tokens), atol=1e-5, rtol=0)

"""Llama, GPT-2 and ViT of transformers with tensor parallelism: GPT-2 and ViT learn what one process learns,
step by step; another plan resumes their checkpoints, and transformers loads the whole state.

All ranks are those of one launch, because each rank needs seconds to import transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama
from dlo_lib.models.checkpoint import save_checkpoint
from dlo_lib.optim.step import summed_cross_entropy
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.mesh import ParallelMesh
from dlo_lib.parallel.parallelize import parallelize
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.tensor import TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.style import ColumnParallel, RowParallel, ShardedHeads
from dlo_lib.parallel.tensor.styles import gpt2_styles, llama_styles
from tests.parallel.tensor.stock_models import CONFIG, check_llama, vit_of_transformers, vit_styles

STEPS, SEQ, VOCAB, HEADS = 4, 8, 61, 4
MAX_NORM = 0.5


def gpt2_of_transformers(dropout: float = 0.0) -> Any:
    import transformers  # seconds, and inside the ranks

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=SEQ,
        n_embd=32,
        n_layer=2,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double()
    with torch.no_grad():  # transformers begins with biases of 0, which hide where a bias is added
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.1)
    return model


@dataclass(frozen=True)
class Stock:
    """A model with its styles and its batches: inputs and targets of one step and one copy of the model."""

    model: Callable[[], Any]
    styles: Callable[[Any], dict[str, Any]]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(VOCAB, (2, 2, SEQ), generator=generator)
    return inputs, targets


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=generator)
    return pixels, torch.randint(2, (2, 1), generator=generator)


GPT2 = Stock(gpt2_of_transformers, lambda _: dict(gpt2_styles(HEADS)), tokens)
VIT = Stock(vit_of_transformers, vit_styles, images)


def batches(stock: Stock, step: int, copies: range) -> tuple[Tensor, Tensor]:
    made = [stock.batch(torch.Generator().manual_seed(100 * step + copy)) for copy in copies]
    inputs, targets = zip(*made)
    return torch.cat(inputs), torch.cat(targets)


def trained_alone(stock: Stock) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Of one process with the data of both copies: losses, gradient norms, and the final state."""
    model = stock.model().train()
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
    model = stock.model().train()
    kind = type(model)
    styles = stock.styles(model)
    spread = parallelize(model, plan, mesh, styles=styles)
    assert type(model) is kind
    if plan.tp > 1:
        linears = sum(isinstance(style, (ColumnParallel, RowParallel)) for style in styles.values())
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


def resumed_by_each_plan(folder: Path) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    """Each plan trains one step of GPT-2, from the checkpoint of the plan before. ViT is not a sequence that
    divides, so it has the plans without sequence parallelism."""
    torch.set_num_threads(1)
    found = []
    for stock, plans in ((GPT2, PLANS), (VIT, [*PLANS[:2], PLANS[0], PLANS[1]])):
        history: tuple[list[float], list[float], dict[str, Tensor]] = ([], [], {})
        for step, plan in enumerate(plans):
            losses, norms, state = trained(stock, plan, step, step + 1, folder / stock.batch.__name__)
            history = (history[0] + losses, history[1] + norms, state)
        found.append(history)
    return found


def check_dropout(group: dist.ProcessGroup) -> None:
    """Random numbers differ between two ranks while they compute on their heads, and are equal elsewhere."""
    model = gpt2_of_transformers(dropout=0.5).train()
    layout = parallelize_tensor(model, group, gpt2_styles(HEADS))
    drawn: dict[str, Tensor] = {}

    def draw(name: str) -> Callable[..., None]:
        def record(*_: Any) -> None:
            state = torch.get_rng_state()
            drawn[name] = torch.rand(4)
            torch.set_rng_state(state)

        return record

    attention = model.transformer.h[1].attn
    attention.c_attn.register_forward_hook(draw("between c_attn and c_proj"))
    attention.c_proj.register_forward_pre_hook(draw("after"))
    torch.manual_seed(1)
    TensorParallel(model, layout)(batches(GPT2, 0, range(1))[0])
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, drawn, group=group)
    (one, other), between = gathered, "between c_attn and c_proj"
    assert not torch.equal(one[between], other[between]), "the heads of both ranks have one mask"
    assert torch.equal(one["after"], other["after"]), "activations that both ranks hold have two masks"


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


def on_each_rank(folder: Path) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    group = dist.group.WORLD
    assert group is not None
    check_llama(group)
    check_dropout(group)
    check_refusals(group)
    return resumed_by_each_plan(folder)


def test_stock_models_learn_what_one_process_learns(tmp_path):
    twins = [trained_alone(stock) for stock in (GPT2, VIT)]
    for rank in run_ranks(on_each_rank, 2, tmp_path):
        for (losses, norms, state), (twin_losses, twin_norms, twin_state) in zip(rank, twins):
            assert losses == pytest.approx(twin_losses, rel=1e-10, abs=0)
            assert norms == pytest.approx(twin_norms, rel=1e-9, abs=0)
            for name, value in twin_state.items():
                torch.testing.assert_close(state[name], value, atol=1e-8, rtol=0)
    again = gpt2_of_transformers()
    again.load_state_dict(state_of_gpt2 := rank[0][2])
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

"""Messages, bytes and skipped blocks are those of the formulas in the docstrings of ``ring`` and
``ulysses``."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama
from dlo_lib.parallel.context import (
    ContextKind,
    ContextParallel,
    SequenceLayout,
    SequencePlacement,
    parallelize_context,
)
from dlo_lib.parallel.context import ring as ring_module
from dlo_lib.parallel.context.documents import document_ids
from tests.parallel.context.twins import CONFIG

BATCH, HEADS, KV_HEADS, SEQ, HEAD_DIM = 2, 8, 2, 48, 6


def local_qkv(context: ContextParallel, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(BATCH, heads, SEQ, HEAD_DIM, generator=random, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return [context.shard(tensor, dim=2).to(dtype).requires_grad_() for tensor in whole]


def attended(context: ContextParallel, dtype: torch.dtype = torch.float64, causal: bool = True) -> Tensor:
    return context.attend(*local_qkv(context, dtype), is_causal=causal, enable_gqa=True)


def traffic(layouts: list[tuple[SequenceLayout, torch.dtype]], causal: bool = True) -> list[dict[str, Any]]:
    found = []
    for layout, dtype in layouts:
        context = ContextParallel(dist.group.WORLD, layout)
        row: dict[str, Any] = {}
        with trace_collectives() as trace:
            out = attended(context, dtype, causal)
        row["forward"] = [(event.call.kind, event.call.ring_bytes) for event in trace.events]
        with trace_collectives() as trace:
            out.sum().backward()
        row["backward"] = [(event.call.kind, event.call.ring_bytes) for event in trace.events]
        found.append(row)
    return found


def sent(calls: list[tuple[Kind, float]], kind: Kind) -> list[float]:
    return [size for found, size in calls if found is kind]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_bytes_of_the_ring_are_those_of_the_formulas(n):
    layouts = [(SequenceLayout(n, 1, placement), torch.float64) for placement in SequencePlacement]
    layouts.append((SequenceLayout(n), torch.bfloat16))
    ranks = run_ranks(traffic, n, layouts)
    s = SEQ // n
    formulas = {  # all ranks together, divided by KV: keys and values, and their gradients
        SequencePlacement.CONTIGUOUS: ((n - 1) / 2, (n - 1) ** 2 / n),
        SequencePlacement.ZIGZAG: (3 / 4 * (n - 1), (1 - 1 / (2 * n)) * (n - 1)),
        SequencePlacement.STRIPED: ((1 - 1 / (n * s)) * (n - 1), (1 - 1 / (2 * s)) * (n - 1)),
    }
    for index, (layout, dtype) in enumerate(layouts):
        kv = 2 * BATCH * KV_HEADS * SEQ * HEAD_DIM * dtype.itemsize
        forward, backward = (
            sum(sum(sent(rows[index][name], Kind.SEND)) for rows in ranks) for name in ("forward", "backward")
        )
        keys, gradients = formulas[layout.placement]
        assert forward == pytest.approx(keys * kv)
        assert backward == pytest.approx((keys + gradients * max(1, 4 / dtype.itemsize)) * kv)
        for rows in ranks:
            row = rows[index]
            assert {kind for name in row for kind, _ in row[name]} <= {Kind.SEND, Kind.RECV}
            if layout.placement is not SequencePlacement.CONTIGUOUS:
                assert len(sent(row["forward"], Kind.SEND)) == n - 1
                assert len(sent(row["backward"], Kind.SEND)) == 2 * (n - 1)


def test_without_a_causal_mask_every_rank_sends_the_same_bytes():
    kv = 2 * BATCH * KV_HEADS * SEQ * HEAD_DIM * 8
    for rows in run_ranks(traffic, 3, [(SequenceLayout(3), torch.float64)], causal=False):
        assert sent(rows[0]["forward"], Kind.SEND) == [kv / 3] * 2
        assert sent(rows[0]["backward"], Kind.SEND) == [kv / 3] * 4


@pytest.mark.parametrize("world", [2, 4])
def test_the_bytes_of_the_all_to_all_are_those_of_the_formula(world):
    layouts = [(SequenceLayout(world, world), torch.float64)]
    for (row,) in run_ranks(traffic, world, layouts):
        b = BATCH * HEADS * (SEQ // world) * HEAD_DIM * 8
        kv_heads = max(KV_HEADS, world)
        qkv, out = b * (1 + 2 * kv_heads / HEADS) * (world - 1) / world, b * (world - 1) / world
        assert row["forward"] == [(Kind.ALL_TO_ALL, qkv), (Kind.ALL_TO_ALL, out)]
        assert row["backward"] == [(Kind.ALL_TO_ALL, out), (Kind.ALL_TO_ALL, qkv)]
        total = sum(size for calls in row.values() for _, size in calls)
        assert total == pytest.approx(2 * (world - 1) / world * b * (2 + 2 * kv_heads / HEADS))


def computed_blocks(layouts: list[SequenceLayout]) -> list[list[int]]:
    """The scores that this rank computes in each ring step, counted at the kernel."""
    counts: list[int] = []
    kernel = ring_module.attend_block

    def counting(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Any) -> Any:
        rows, columns = q.shape[2], k.shape[2]
        counts.append(rows * (rows + 1) // 2 if causal else rows * columns)
        return kernel(q, k, v, scale, causal, bias)

    ring_module.attend_block = counting  # in this rank only
    found = []
    for layout in layouts:
        context = ContextParallel(dist.group.WORLD, layout)
        counts.clear()
        attended(context)
        found.append(list(counts))
        with context.documents(document_ids([12] * 4, SEQ).expand(BATCH, -1)):
            counts.clear()
            attended(context)
            found.append(list(counts))
    return found


def test_the_ranks_compute_the_planned_scores_and_skip_hidden_blocks():
    layouts = [SequenceLayout(4, 1, placement) for placement in SequencePlacement]
    for rank, found in enumerate(run_ranks(computed_blocks, 4, layouts)):
        for layout, whole in zip(layouts, found[::2], strict=True):
            assert whole == [step[rank] for step in layout.work(SEQ) if step[rank]]
        contiguous_documents, zigzag_documents = found[1], found[3]
        assert contiguous_documents == [12 * 13 // 2]  # one document per rank: three blocks are skipped
        # Chunks of 6 tokens: the other half of the document of each chunk is on one other rank.
        assert sum(zigzag_documents) == 2 * 6 * 7 // 2 + 36
    total = sum(sum(found[0]) for found in run_ranks(computed_blocks, 4, layouts[:1]))
    assert total == SEQ * (SEQ + 1) // 2


def live_bytes(layout: SequenceLayout) -> tuple[int, int]:
    """The bytes that autograd saves for the backward of attention, and those of q, k, v, out and LSE."""
    context = ContextParallel(dist.group.WORLD, layout)
    q, k, v = local_qkv(context)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    gc.collect()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = context.attend(q, k, v, is_causal=True, enable_gqa=True)
    sizes = [tensor.nbytes for tensor in (q, k, v, out)]
    return sum(saved.values()), sum(sizes) + q.nbytes // HEAD_DIM


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_rank_saves_its_part_only(world):
    whole = BATCH * SEQ * HEAD_DIM * 8 * (2 * HEADS + 2 * KV_HEADS) + BATCH * SEQ * HEADS * 8
    for saved, formula in run_ranks(live_bytes, world, SequenceLayout(world)):
        assert saved == formula == whole // world


def largest_error(layouts: list[SequenceLayout]) -> float:
    """The largest error of the output of every layout, without a causal mask and with, against one
    process."""
    worst = 0.0
    this_rank = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = ContextParallel(this_rank, SequenceLayout(1))
    for layout in layouts:
        context = ContextParallel(dist.group.WORLD, layout)
        for causal in (True, False):
            out, whole = attended(context, causal=causal), attended(alone, causal=causal)
            worst = max(worst, (out - context.shard(whole, dim=2)).abs().max().item())
    return worst


def test_attention_without_a_causal_mask_is_that_of_one_process():
    layouts = [SequenceLayout(4, inner, placement) for placement in SequencePlacement for inner in (1, 2, 4)]
    assert max(run_ranks(largest_error, 4, layouts)) < 1e-12


def refusals() -> list[str]:
    context = ContextParallel(dist.group.WORLD, SequenceLayout(2))
    q, k, v = local_qkv(context)
    found = []

    def refused(call) -> None:
        with pytest.raises(UserError) as error:
            call()
        found.append(str(error.value))

    refused(lambda: context.attend(q, k, v, attn_mask=torch.ones(1), enable_gqa=True))
    refused(lambda: context.attend(q, k, v, dropout_p=0.1, enable_gqa=True))
    refused(lambda: context.attend(q, k[:, :, 1:], v, enable_gqa=True))
    refused(lambda: context.attend(q, k, v))
    with context.documents(torch.zeros(BATCH, SEQ // 2)):
        refused(lambda: context.attend(q, k, v, enable_gqa=True))
    refused(lambda: ContextParallel(dist.group.WORLD, SequenceLayout(3)))
    refused(lambda: parallelize_context(torch.nn.Linear(2, 2)))
    refused(lambda: parallelize_context(Llama(CONFIG), inner=2))
    refused(lambda: parallelize_context(Llama(CONFIG), kind=ContextKind.COMBINED))
    odd = Llama(replace(CONFIG, num_heads=3, num_kv_heads=1))
    refused(lambda: parallelize_context(odd, kind=ContextKind.ULYSSES))
    return found


def test_bad_input_is_refused_with_the_cure():
    said = run_ranks(refusals, 2)[0]
    cures = [
        "ContextParallel.documents",
        "ContextParallel.documents",
        "self-attention",
        "enable_gqa=True",
        "(batch, seq)",
        "equal numbers",
        "self.attend",
        "kind combined only",
        "kind combined only",
        "one of 1, 3, or a ring",
    ]
    assert len(said) == len(cures)
    for message, cure in zip(said, cures, strict=True):
        assert cure in message


def test_without_a_process_group_it_is_refused():
    with pytest.raises(UserError, match="needs a process group"):
        parallelize_context(Llama(CONFIG))

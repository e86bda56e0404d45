"""Context parallelism: attention over ranks compared with the ring-attention template of PyTorch, over gloo.

The public ``context_parallel`` of PyTorch has no rule for the attention kernel of the CPU and fails. The
functions below it, ``_templated_ring_attention`` and its backward, accept this kernel; they are the peer, in
its balanced order (zig-zag) unless stated otherwise. Both get the same local queries, keys and values, and
use the same kernel.

    ring, zig-zag     ours and the peer in the same order
    ring, contiguous  ours and the peer without balance
    ring, striped     the peer in the zig-zag order
    all-to-all        the peer in the zig-zag order, because PyTorch has no all-to-all form
    combined          rings of two groups of two ranks that exchange heads; the same peer, on 4 ranks only
    Llama             a training step of a Llama under DDP, with both rings in the zig-zag order

A turn is the forward and backward of ``LAYERS`` attention layers, or one training step. The floor is the
attention of the whole sequences in one process; the training step has none. The limit is the arithmetic and
the messages alone: the kernel on the blocks of each rank from contiguous memory, without merging, and our
messages alone (``benchmarks.replay``). Memory is measured in separate jobs (``benchmarks.peaks``).
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from benchmarks.paired import (
    Row,
    Turn,
    Turns,
    compare,
    measure,
    median_cpu,
    of_limit,
    ratios,
    rounds_over_ranks,
    take_rounds,
)
from benchmarks.peaks import peaks_in_turns, return_freed_memory
from benchmarks.replay import Replay
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel import DDP
from dlo_lib.parallel.context import ContextKind, ContextParallel, SequencePlacement, parallelize_context
from dlo_lib.parallel.context.kernels import attend_block, attend_block_backward

CASES = {
    # name: the model of the training step, of which attention has the heads; the sequences and their tokens
    "hidden 256": (
        LlamaConfig(257, 256, 704, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=64),
        2,
        1024,
    ),
    "hidden 1024": (
        LlamaConfig(257, 1024, 2816, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=128),
        1,
        1024,
    ),
}
LAYERS = 2
MEMORY_STEPS, MEMORY_REPEATS = 3, 2


@dataclass(frozen=True)
class Form:
    """One comparison."""

    kind: ContextKind
    placement: SequencePlacement
    balanced_peer: bool = True
    training: bool = False
    inner: int | None = None

    def parallelize(self, model: Llama) -> None:
        parallelize_context(model, kind=self.kind, placement=self.placement, inner=self.inner)

    def context(self) -> ContextParallel:
        layout = self.kind.layout(dist.get_world_size(), self.placement, self.inner)
        return ContextParallel(_world(), layout)


FORMS = {
    "ring, zig-zag": Form(ContextKind.RING, SequencePlacement.ZIGZAG),
    "ring, contiguous": Form(ContextKind.RING, SequencePlacement.CONTIGUOUS, balanced_peer=False),
    "ring, striped": Form(ContextKind.RING, SequencePlacement.STRIPED),
    "all-to-all": Form(ContextKind.ULYSSES, SequencePlacement.ZIGZAG),
    "combined": Form(ContextKind.COMBINED, SequencePlacement.ZIGZAG, inner=2),
    "Llama": Form(ContextKind.RING, SequencePlacement.ZIGZAG, training=True),
}
WORLD_SIZES = (2, 4)
ROWS = len(FORMS) * len(CASES) * len(WORLD_SIZES) - len(CASES)  # "combined" needs 4 ranks
SECONDS = (14.0, 1.6)


def rows(pairs: int = 30) -> Iterator[Row]:
    for name in FORMS:
        for case in CASES:
            for world_size in WORLD_SIZES:
                if (FORMS[name].inner or 1) < world_size:
                    yield row(name, case, world_size, pairs)


class _Template(torch.autograd.Function):
    """The ring-attention template of PyTorch with the kernel of the CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, balanced: bool) -> Tensor:
        theirs._cp_options.enable_load_balance = balanced
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = theirs._templated_ring_attention(_world(), 2, kernel, q, k, v, is_causal=True)
        ctx.balanced = balanced
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        theirs._cp_options.enable_load_balance = ctx.balanced
        q, k, v, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = theirs._templated_ring_attention_backward(
            _world(), 2, kernel, grad, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return *grads, None


class Candidate:
    """The attention layers, or the training step, of one implementation: ours, peer, alone (one process) or
    blocks (the kernel only)."""

    def __init__(self, form: Form, case: str, wrapper: str) -> None:
        config, batch, seq = CASES[case]
        self.form, self.wrapper = form, wrapper
        self.context = form.context()
        random = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        if form.training:
            self._build_training(config, batch, seq, random)
            return
        layout, heads, kv_heads = self.context.layout, config.num_heads, config.num_kv_heads
        local = seq if wrapper == "alone" else seq // layout.ranks
        if wrapper == "blocks":  # after the all-to-all: whole parts of the ring, a part of the heads
            local, heads, kv_heads = (
                local * layout.inner,
                heads // layout.inner,
                max(kv_heads // layout.inner, 1),
            )
        self.tensors = [
            _drawn(random, batch, local, count, config.head_dim).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        self.grad = _drawn(random, batch, local, heads, config.head_dim)

    def _build_training(self, config: LlamaConfig, batch: int, seq: int, random: torch.Generator) -> None:
        model = Llama(config)
        tokens = torch.randint(config.vocab_size, (batch, seq + 1), generator=random)
        self.pairs = [(self.context.shard(tokens[:, :-1]), self.context.shard(tokens[:, 1:]))]
        self.form.parallelize(model)  # also the peer: the angles of the positions are the same
        if self.wrapper == "peer":
            for block in model.layers:
                block.self_attn.attend = self._attend_peer  # type: ignore[union-attr, assignment]
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def _attend_peer(self, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        out: Tensor = _Template.apply(q, k, v, self.form.balanced_peer)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.wrapper == "peer":
            return self._attend_peer(q, k, v)
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        if self.wrapper == "ours":
            attend = self.context.attend
        return attend(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def step(self) -> None:
        if self.form.training:
            train_step(self.model, self.optimizer, self.pairs, group=dist.group.WORLD)
            return
        for _ in range(LAYERS):
            if self.wrapper == "blocks":
                self._blocks()
                continue
            out = self._attend(*self.tensors)
            torch.autograd.grad(out, self.tensors, self.grad)

    def _blocks(self) -> None:
        """Run the kernel on the blocks of this rank, without messages and merging."""
        q, k, v = (tensor.detach() for tensor in self.tensors)
        scale, layout = q.shape[-1] ** -0.5, self.context.layout
        place, seq = self.context.rank // layout.inner, q.shape[2] * layout.ring
        for step in range(layout.ring):
            found = layout.rectangle(place, layout.key_of(place, step), seq)
            if found is not None:
                rows, columns = found.rows, found.columns
                q_rows, grad = q[:, :, rows], self.grad[:, :, rows]
                keys, values = k[:, :, columns], v[:, :, columns]
                out, lse = attend_block(q_rows, keys, values, scale, found.causal)
                attend_block_backward(grad, q_rows, keys, values, out, lse, scale, found.causal)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _drawn(random: torch.Generator, batch: int, local: int, heads: int, head_dim: int) -> Tensor:
    """Return random numbers (batch, heads, local, head_dim) in the memory layout of the output of a linear
    layer: the heads are inside."""
    return torch.randn(batch, local, heads, head_dim, generator=random).transpose(1, 2)


def row(name: str, case: str, world_size: int, pairs: int) -> Row:
    """Measure one comparison."""
    form = FORMS[name]
    per_rank = run_ranks(_rounds, world_size, form, case, pairs, explain=Explain.OFF)
    rounds = rounds_over_ranks(per_rank)
    turns = Turns(rounds["ours"], rounds["peer"])
    note, floor = "", None
    if not form.training:
        floor = median_cpu(rounds["alone"])
        blocks, messages, ours, peer = (
            median_cpu(rounds[part]) for part in ("blocks", "messages", "ours", "peer")
        )
        note = f"ours / limit {of_limit(rounds, 'blocks', 'messages')}; "
        note += f"limit / peer {(blocks + messages) / peer:.2f}; "
        note += f"ours {1e3 * ours / world_size:.0f} ms per rank, of which the kernel "
        note += f"{1e3 * blocks / world_size:.0f} and messages {1e3 * messages / world_size:.0f}; "
    repeats = min(MEMORY_REPEATS, -(-pairs // 4))

    def job(wrapper: str) -> list[int]:
        return run_ranks(_peak, world_size, form, case, wrapper, explain=Explain.OFF)

    peaks = peaks_in_turns(job, repeats)
    mine, its = (statistics.median(peaks[wrapper]) / 2**20 for wrapper in ("ours", "peer"))
    note += f"peak {mine:.0f} MiB against {its:.0f} MiB per rank"
    peer_name = f"template, {'balanced' if form.balanced_peer else 'not balanced'}"
    compared = compare(f"{name}, {case}", peer_name, world_size, turns, floor_cpu=floor, note=note)
    return replace(compared, memory_ratio=ratios(peaks["ours"], peaks["peer"]))


def _rounds(form: Form, case: str, pairs: int) -> dict[str, list[Turn]]:
    """Measure ours and the peer; and the kernel on our blocks, our messages, and attention in one process,
    each alone. They are in one round, because on a loaded machine what is measured later has another
    load."""
    warnings.simplefilter("ignore", FutureWarning)  # the peer calls deprecated functions of PyTorch
    torch.set_num_threads(1)
    ours, peer = (Candidate(form, case, wrapper) for wrapper in ("ours", "peer"))
    actions: dict[str, Callable[[], object]] = {"ours": ours.step, "peer": peer.step}
    if not form.training:
        actions |= {"blocks": Candidate(form, case, "blocks").step, "messages": Replay(ours.step).run}
        alone = Candidate(form, case, "alone")  # on every rank, because all ranks create the groups of a form
        actions["alone"] = alone.step if dist.get_rank() == 0 else lambda: None
    return take_rounds(actions, pairs, between=dist.barrier)


def _peak(form: Form, case: str, wrapper: str) -> int:
    """Return the peak memory above the start, in bytes, of several steps in a new process."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    return_freed_memory()

    def train() -> None:
        candidate = Candidate(form, case, wrapper)
        for _ in range(MEMORY_STEPS):
            candidate.step()

    return measure(train).memory

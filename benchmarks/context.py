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
the messages alone, from packed memory: the kernel on the blocks of each rank with our messages beside it, and
the merges and sums of a ring in place. A message is sent from the memory that the previous one was received
into, as in the ring: messages that send the same memory again and again (``benchmarks.replay``) find it in
the caches, and nothing beside them takes the cores. The note has the parts. Memory is measured in separate
jobs (``benchmarks.peaks``).
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
from dlo_lib.comm.collectives.messages import Communicator
from dlo_lib.comm.collectives.travelling import Ring, Travelling
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import train_step
from dlo_lib.parallel import DDP
from dlo_lib.parallel.context import ContextKind, ContextParallel, SequencePlacement, parallelize_context
from dlo_lib.parallel.context.kernels import attend_block, attend_block_backward
from dlo_lib.parallel.context.placement import Rectangle
from dlo_lib.parallel.context.ring import GRADIENTS, KEYS
from dlo_lib.parallel.context.ring_plan import ring_plan
from dlo_lib.parallel.context.softmax import merge_block

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
SECONDS = (14.0, 2.2)


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
    """The attention layers, or the training step, of one implementation: ours, peer or alone (one
    process)."""

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
            out = self._attend(*self.tensors)
            torch.autograd.grad(out, self.tensors, self.grad)


class Limit:
    """The kernel on the blocks of this rank and our messages, from packed memory, and the merges and sums in
    place: no copies."""

    def __init__(self, form: Form, case: str) -> None:
        config, batch, seq = CASES[case]
        context, layout = form.context(), form.context().layout
        self.inner = context.inner_group if layout.inner > 1 else None
        self.ring = Ring(Communicator.of(context.ring_group), layout.direction) if layout.ring > 1 else None
        self.steps = ring_plan(layout, context.rank // layout.inner, seq).steps
        # After the all-to-all: whole parts of the ring, a part of the heads.
        heads, kv_heads = (max(count // layout.inner, 1) for count in (config.num_heads, config.num_kv_heads))
        random, tokens = torch.Generator().manual_seed(0), seq // layout.ring
        self.q = _drawn(random, batch, tokens, heads, config.head_dim)
        self.grad = _drawn(random, batch, tokens, heads, config.head_dim)
        self.kv = torch.randn(2, batch, kv_heads, tokens, config.head_dim, generator=random)
        self.gradients = torch.randn(self.kv.numel(), generator=random)
        self.scale = config.head_dim**-0.5
        self.out, self.dq = (torch.randn(batch, tokens, heads, config.head_dim) for _ in range(2))
        self.lse = torch.randn(batch, tokens, heads)

    def blocks(self) -> None:
        """Run the kernel alone."""
        for _ in range(LAYERS):
            parts = [part for step in self.steps for part in step.rectangles]
            for part, found in [(part, self._forward(self.kv, part)) for part in parts]:
                self._backward(self.kv, part, *found)

    def together(self) -> None:
        """Run the kernel, and send the messages beside it in the order of the ring."""
        qkv, out = self.q.numel() + self.kv.numel(), self.q.numel()
        for _ in range(LAYERS):
            self._all_to_all(qkv)
            found = self._ring_forward()
            self._all_to_all(out)
            self._all_to_all(out)
            self._ring_backward(found)
            self._all_to_all(qkv)

    def sums(self) -> None:
        """Merge blocks of the forward and add gradients, as often as this rank does."""
        gradients = self.gradients.view(2, *self.kv.transpose(2, 3).shape[1:])  # a message of dk and dv
        for _ in range(LAYERS):
            for step in self.steps[1:]:
                for part in step.rectangles:
                    rows, columns = part.rows, part.columns
                    out, lse = self.out[:, rows].transpose(1, 2), self.lse[:, rows].transpose(1, 2)
                    merge_block(out, lse, self.q[:, :, rows], lse.clone())
                    self.dq[:, rows] += self.grad[:, :, rows].transpose(1, 2)
                    gradients[:, :, columns] += gradients[:, :, columns]

    def _forward(self, kv: Tensor, part: Rectangle) -> tuple[Tensor, Tensor]:
        keys, values = kv[:, :, :, part.columns]
        return attend_block(self.q[:, :, part.rows], keys, values, self.scale, part.causal)

    def _backward(self, kv: Tensor, part: Rectangle, out: Tensor, lse: Tensor) -> None:
        (keys, values), rows = kv[:, :, :, part.columns], part.rows
        q, grad = self.q[:, :, rows], self.grad[:, :, rows]
        attend_block_backward(grad, q, keys, values, out, lse, self.scale, part.causal)

    def _ring_forward(self) -> list[list[tuple[Tensor, Tensor]]]:
        kv, travelling, found = self.kv, self._keys(), []
        for step in self.steps:
            self._send(travelling, kv, step.keys_sent)
            found.append([self._forward(kv, part) for part in step.rectangles])
            kv = self._received(travelling, kv)
        return found

    def _ring_backward(self, found: list[list[tuple[Tensor, Tensor]]]) -> None:
        kv, travelling, gradients, sum_ = self.kv, self._keys(), self._sums(), self.gradients
        for number, (step, results) in enumerate(zip(self.steps, found, strict=True)):
            self._send(travelling, kv, step.keys_sent)
            for part, result in zip(step.rectangles, results, strict=True):
                self._backward(kv, part, *result)
            if number > 0:
                sum_ = self.gradients if number == 1 else self._received(gradients, sum_)
                self._send(gradients, sum_, step.grads_sent)
            kv = self._received(travelling, kv)
        self._received(gradients, sum_)

    def _keys(self) -> Travelling | None:
        return self._travelling(KEYS, [step.keys_received for step in self.steps])

    def _sums(self) -> Travelling | None:
        return self._travelling(GRADIENTS, [step.grads_received for step in self.steps[1:]])

    def _travelling(self, tag: int, lengths: list[int]) -> Travelling | None:
        if self.ring is None:
            return None
        _, batch, heads, _, head_dim = self.kv.shape
        shapes = [(2, batch, heads, tokens, head_dim) for tokens in lengths]
        return Travelling(self.ring, tag, shapes, self.kv)

    def _send(self, travelling: Travelling | None, message: Tensor, tokens: int) -> None:
        """Send a message of this size from the memory of ``message``."""
        if travelling is not None:
            size = 2 * self.kv[0, :, :, :1].numel() * tokens
            # A message that grows, in the striped placement, takes the memory of this rank.
            source = message if message.numel() >= size else self.kv
            travelling.exchange(source.flatten()[:size])

    def _received(self, travelling: Travelling | None, otherwise: Tensor) -> Tensor:
        return otherwise if travelling is None else travelling.wait()

    def _all_to_all(self, numbers: int) -> None:
        if self.inner is not None:
            sent = self.q.new_empty(numbers)
            dist.all_to_all_single(torch.empty_like(sent), sent, group=self.inner)


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
        rounds["limit"] = [
            Turn(with_messages.wall + sums.wall, with_messages.cpu + sums.cpu, 0)
            for with_messages, sums in zip(rounds["together"], rounds["sums"], strict=True)
        ]
        ours, limit, blocks, messages = (
            1e3 * median_cpu(rounds[part]) / world_size for part in ("ours", "limit", "blocks", "messages")
        )
        note = f"ours / limit {of_limit(rounds, 'limit')}; "
        note += (
            f"limit / peer {ratios(*([turn.cpu for turn in rounds[part]] for part in ('limit', 'peer')))}; "
        )
        note += f"ours {ours:.0f} ms per rank, limit {limit:.0f}, the kernel alone {blocks:.0f}, "
        note += f"messages alone, of the same memory, {messages:.0f}; "
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
    """Measure ours and the peer; the limit; and the kernel on our blocks, our messages, and attention in one
    process, each alone. They are in one round, because on a loaded machine what is measured later has another
    load."""
    warnings.simplefilter("ignore", FutureWarning)  # the peer calls deprecated functions of PyTorch
    torch.set_num_threads(1)
    ours, peer = (Candidate(form, case, wrapper) for wrapper in ("ours", "peer"))
    actions: dict[str, Callable[[], object]] = {"ours": ours.step, "peer": peer.step}
    if not form.training:
        limit = Limit(form, case)
        actions |= {"together": limit.together, "sums": limit.sums, "blocks": limit.blocks}
        actions["messages"] = Replay(ours.step).run
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

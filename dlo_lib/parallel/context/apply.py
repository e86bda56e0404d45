"""Context parallelism of a model: every rank of a group computes a part of the tokens of each sequence.

Only attention connects tokens. The other layers are unchanged, and each rank holds all their parameters.
``parallelize_context`` changes the attention modules of a model in place:

1. It replaces ``attend``, the attribute through which a module calls ``F.scaled_dot_product_attention``.
2. In the attention of a Llama, it replaces the angles of the positions 0 ... local - 1, which the model
   computes from the shape of its input, by those of the positions of this rank.

Inputs and targets are divided by the same ``SequenceLayout``, after the targets are shifted by one token.
With the loss

    sum of the local token losses * ranks / valid tokens of all ranks     (``optim.step.train_step``)

the gradient of a parameter is the mean over the ranks, as in data parallelism. DDP, ZeRO or FSDP over the
ranks of data and context parallelism together therefore need no change:

    mesh = ParallelMesh(Degrees(dp_shard=2, cp=2))
    context = parallelize_context(model, mesh.group_along("cp"))
    model = FSDP(model, mesh.group_along("dp_shard", "cp"))
    inputs, targets = (context.shard(tensor) for tensor in batch)      the batch is equal on the ranks of cp
    train_step(model, optimizer, [(inputs, targets)], group=mesh.group_along("dp_shard", "cp"))

Communication and memory: see ``ring`` and ``ulysses``, for each attention layer. Activations are 1/N of those
of one process.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.models.llama import Attention, LlamaConfig, rotation
from dlo_lib.parallel.context.placement import SequenceLayout, SequencePlacement
from dlo_lib.parallel.context.ring import ring_attention
from dlo_lib.parallel.context.ring_plan import RingPlan, ring_plan
from dlo_lib.parallel.context.ulysses import check_heads, heads_to_sequence, sequence_to_heads
from dlo_lib.parallel.mesh import Degrees, ParallelMesh
from dlo_lib.parallel.protocol import process_group


class ContextKind(enum.Enum):
    """The forms of attention over ranks."""

    RING = "ring"
    """Keys and values travel round all ranks. Any number of heads."""
    ULYSSES = "ulysses"
    """Heads are exchanged for parts of the sequence. The number of ranks divides the number of heads."""
    COMBINED = "combined"
    """Heads are exchanged inside groups of consecutive ranks; the groups form rings."""

    def layout(self, ranks: int, placement: SequencePlacement, inner: int | None = None) -> SequenceLayout:
        """Return the layout of this form over ``ranks`` ranks.

        Args:
            inner: the ranks of a group that exchanges heads, for ``COMBINED`` only.

        Raises:
            UserError: ``inner`` is missing, is not needed, or does not divide ``ranks``.
        """
        if (inner is None) == (self is ContextKind.COMBINED):
            raise UserError(
                f"context parallelism of kind {self.value} with inner {inner}: inner is the number of ranks "
                "that exchange heads, and belongs to kind combined only"
            )
        sizes = {ContextKind.RING: 1, ContextKind.ULYSSES: ranks}
        return SequenceLayout(ranks, sizes.get(self, inner or 1), placement)


class ContextParallel:
    """Attention of this rank's tokens to the tokens of all ranks of a group.

    Args:
        group: the ranks, in the order of the layout.
        layout: the tokens of each rank.

    Attributes:
        ring_group, inner_group: the ranks that exchange keys and values, and those that exchange heads; each
            is ``group`` unless both forms are combined.

    Raises:
        UserError: the layout has another number of ranks than the group.
    """

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout) -> None:
        ranks = dist.get_world_size(group)
        if layout.ranks != ranks:
            raise UserError(f"a layout of {layout.ranks} ranks for a group of {ranks}: use equal numbers")
        self.group, self.layout = group, layout
        self.rank = dist.get_rank(group)
        self.ring_group = self.inner_group = group
        if layout.ring > 1 and layout.inner > 1:
            mesh = ParallelMesh(Degrees(dp_replicate=layout.ring, dp_shard=layout.inner), group)
            self.ring_group, self.inner_group = mesh.group_along("dp_replicate"), mesh.group_along("dp_shard")
        self._documents: Tensor | None = None
        self._plans: dict[tuple[int, bool], RingPlan] = {}
        self._angles: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return the part of this rank of inputs, targets or document ids of whole sequences.

        Raises:
            UserError: the sequence cannot be divided equally. The message names lengths that can.
        """
        return self.layout.shard(tensor, self.rank, dim)

    def positions(self, local: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of this rank's ``local`` tokens in the whole sequence, (local,) int64."""
        return self.layout.positions(self.rank, local * self.layout.ranks, device)

    @contextlib.contextmanager
    def documents(self, ids: Tensor) -> Iterator[None]:
        """Attention inside the context is restricted to documents.

        Args:
            ids: the number of the document of each token of the whole sequences, (batch, seq); equal on all
                ranks of the group. ``documents.document_ids`` makes them from lengths.

        Forward and backward of the batch are both inside the context, because activation checkpointing
        repeats the forward.
        """
        before = self._documents, self._plans
        self._documents, self._plans = ids, {}
        try:
            yield
        finally:
            self._documents, self._plans = before

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute ``F.scaled_dot_product_attention`` of the whole sequence, for the tokens of this rank.

        The arguments are those of the function, with the local tokens: q (batch, heads, local, head_dim), k
            and v (batch, kv_heads, local, head_dim). ``is_causal`` refers to the positions in the whole
            sequence.

        Raises:
            UserError: a mask or dropout is given, the tensors have different numbers of tokens, or the heads
                cannot be divided over the ranks of an all-to-all.
        """
        if attn_mask is not None or dropout_p:
            raise UserError(
                "context-parallel attention has no attn_mask and no dropout: "
                "use is_causal and ContextParallel.documents"
            )
        if not q.shape[2] == k.shape[2] == v.shape[2]:
            raise UserError(
                f"context-parallel attention of {q.shape[2]} queries to {k.shape[2]} keys: use self-attention"
            )
        if q.shape[1] != k.shape[1] and not enable_gqa:
            raise UserError(f"{q.shape[1]} query and {k.shape[1]} key heads: use enable_gqa=True")
        device = q.device.type
        if torch.is_autocast_enabled(device):
            q, k, v = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (q, k, v))
        layout = self.layout
        if layout.inner > 1:
            q, k, v = sequence_to_heads(q, k, v, self.inner_group)
        if layout.ring == 1 and self._documents is None:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        else:
            with torch.autocast(device, enabled=False):
                out = ring_attention(q, k, v, self._plan_of(q, is_causal), self.ring_group, scale)
        return heads_to_sequence(out, self.inner_group) if layout.inner > 1 else out

    def angles(self, config: LlamaConfig, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles of this rank's positions, each (local, head_dim).

        Args:
            like: cos of the positions 0 ... local - 1 (``models.llama.rotation``), for shape, dtype and
            device.
        """
        local = like.shape[0]
        # Tensors that are made in inference mode cannot be used in training.
        key = (config, local, like.dtype, like.device, torch.is_inference_mode_enabled())
        if key not in self._angles:
            positions = self.positions(local, like.device)
            cos, sin = (angle[positions] for angle in rotation(config, local * self.layout.ranks, like))
            self._angles = {key: (cos, sin)}  # of the last shape only
        return self._angles[key]

    def _plan_of(self, q: Tensor, causal: bool) -> RingPlan:
        """Return the ring steps for the queries ``q`` of this rank."""
        layout, ids = self.layout, self._documents
        seq = q.shape[2] * layout.ring
        if ids is not None and ids.shape != (q.shape[0], seq):
            raise UserError(
                f"document ids {tuple(ids.shape)} for {q.shape[0]} sequences of {seq} tokens: "
                "give those of the whole sequences, (batch, seq)"
            )
        if (seq, causal) not in self._plans:
            self._plans[seq, causal] = ring_plan(layout, self.rank // layout.inner, seq, causal, ids)
        return self._plans[seq, causal]


def parallelize_context(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    kind: ContextKind = ContextKind.RING,
    placement: SequencePlacement = SequencePlacement.ZIGZAG,
    inner: int | None = None,
) -> ContextParallel:
    """Make the attention of ``model`` context-parallel over ``group``, in place; called by every rank.

    Call it before the model is cut into stages or wrapped for data parallelism, after tensor parallelism. The
    model then expects the tokens of this rank, ``ContextParallel.shard`` of the whole sequences, and returns
    their logits (batch, seq / ranks, vocab_size). Parameters, their names and their values do not change.

    Args:
        model: a Llama, or a stage of one; or any module that contains modules with an attribute ``attend``,
            which they call with the arguments of ``F.scaled_dot_product_attention``. Such a model takes its
            positions from ``ContextParallel.positions``.
        group: the ranks that share each sequence (``cp`` of the mesh); None for all ranks.
        kind: the form of attention over ranks.
        placement: the assignment of tokens to the ranks of the ring. ``ULYSSES`` has no ring and ignores it.
        inner: the ranks of a group that exchanges heads, for ``ContextKind.COMBINED``.

    Returns the object that divides batches and holds the documents of a packed batch.

    Raises:
        UserError: there is no process group; no module has an attribute ``attend``; ``inner`` does not fit;
            the heads of a Llama cannot be divided over the ranks of the all-to-all.
    """
    group = process_group(group, "context parallelism")
    layout = kind.layout(dist.get_world_size(group), placement, inner)
    modules = [module for module in model.modules() if hasattr(module, "attend")]
    if not modules:
        raise UserError(
            f"no attention module in {type(model).__name__}: give the module an attribute attend = "
            "F.scaled_dot_product_attention and call it through self.attend"
        )
    llamas = [module for module in modules if isinstance(module, Attention)]
    for llama in llamas:
        heads, kv_heads = (
            projection.weight.shape[0] // llama.head_dim for projection in (llama.q_proj, llama.k_proj)
        )
        check_heads(heads, kv_heads, layout.inner)
    context = ContextParallel(group, layout)
    for module in modules:
        module.attend = context.attend  # type: ignore[assignment]
    for llama in llamas:
        llama.register_forward_pre_hook(_with_angles(context, llama.config))
    return context


def _with_angles(context: ContextParallel, config: LlamaConfig) -> Callable[[nn.Module, Any], Any]:
    """Return a hook that gives the attention of a Llama the angles of this rank's positions."""

    def hook(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, cos, _ = args
        return (x, *context.angles(config, cos))

    return hook

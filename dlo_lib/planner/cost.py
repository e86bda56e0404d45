"""The time of a training step for many plans at once, as a sum of parts.

    step = micro-batches * (blocks * block + sends + head) + bubble + exposed data parallelism + AdamW
    block = forward + backward + recomputation, each of matrix products, memory-bound kernels, collectives

A product of (m, k) and (k, n) takes 2 m n k / (peak * matmul) * (1 + depth / k) * waves: short sums fill the
tensor cores less, and the last wave of tiles fills the GPU partly. It takes at least the time of its bytes.
Kernels between products take bytes / (rate * memory). Ring collectives take (n - 1) / n * bytes / link, on
the slowest link that their group crosses. Gradients and sharded parameters travel beside the computation,
which has fewer multiprocessors meanwhile: a channel of NCCL keeps one for itself. Papers: Megatron-LM
(arXiv:2104.04473), the alpha-beta model (Thakur et al., 2005), FSDP (arXiv:2304.11277).

What is left out: stragglers, the input pipeline, contention between jobs, and the search of NCCL for another
algorithm than a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dlo_lib.hardware import GpuNodes
from dlo_lib.planner.plans import Array, Checkpointing, Plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stack import Stack
from dlo_lib.planner.stages import balanced_stages, bubble

TILE = (128, 256)
"""The rows and columns of a tile of a large product. A streaming multiprocessor computes one at a time."""
CHANNELS = 2
"""The channels of NCCL for each port of a node. Each keeps a multiprocessor for itself (NVIDIA/nccl, issue
689: 16 with eight ports)."""
KERNEL_BYTES = np.array(
    [
        [(84, 214), (20, 24), (20, 32), (10, 18)],
        [(106, 286), (36, 54), (30, 62), (10, 18)],
        [(20, 40), (4, 8), (4, 8), (6, 12)],
        [(30, 60), (4, 8), (4, 8), (6, 12)],
    ]
)
"""The bytes that the kernels between the products of a Llama block read and write, in forward and in
backward, for each feature of a token: of ``hidden`` (norms, residuals, sums of gradients), of the queries, of
the keys (rotations) and of the MLP. The rows: eager with parameters in bf16, eager with autocast, which keeps
residuals in fp32, and both with few kernels, fused or compiled. The eager rows count each tensor that an
operation reads or writes once."""
COMPUTED = (
    "matrix products",
    "attention",
    "memory-bound kernels",
    "recomputation",
    "vocabulary head and loss",
)
"""The parts of a step to which the slowdown of a stack applies."""


@dataclass(frozen=True)
class StepCost:
    """The seconds of a step of each plan by part, arrays of shape (plans,). The parts follow one another, so
    that their sum is the step."""

    parts: dict[str, Array]
    flops: Array
    """Model FLOPs of the step of all GPUs, (plans,)."""
    peak: Array
    """FLOP/s of all GPUs of a plan."""

    @property
    def seconds(self) -> Array:
        """The time of a step, (plans,)."""
        return np.add.reduce(list(self.parts.values()))

    def rows(self, index: Array) -> StepCost:
        """Return the costs of some of the plans, by a mask or their indices."""
        parts = {name: seconds[index] for name, seconds in self.parts.items()}
        return StepCost(parts, self.flops[index], self.peak[index])

    @property
    def mfu(self) -> Array:
        """Model FLOPs utilisation, (plans,)."""
        return self.flops / (self.seconds * self.peak)


class BlockParts(NamedTuple):
    """The seconds of one micro-batch on a block, each part of shape (2, plans): forward and backward."""

    linears: Array
    attention: Array
    small: Array
    tensor: Array
    context: Array
    experts: Array

    @property
    def forward(self) -> Array:
        """Seconds of the forward, (plans,)."""
        return np.add.reduce([part[0] for part in self])

    @property
    def backward(self) -> Array:
        """Seconds of the backward without recomputation, (plans,)."""
        return np.add.reduce([part[1] for part in self])


def step_cost(
    sizes: ModelSizes, plans: Plans, seq: int, nodes: GpuNodes, stack: Stack, dtype: str = "bf16"
) -> StepCost:
    """Return the time of one training step of each plan.

    Args:
        seq: the tokens of a sequence.
        nodes: GPUs and links.
        stack: the constants of the software.
        dtype: of the matrix products; its peak is used.

    Raises:
        UserError: the GPU has no peak for ``dtype``.
    """
    return StepParts(sizes, plans, seq, nodes, stack, dtype).cost()


class StepParts:
    """The parts of a step, each a method; ``machine`` has others for a CPU."""

    word: float = 2
    """The bytes of an element of an activation or a parameter on the wire."""

    def __init__(
        self, sizes: ModelSizes, plans: Plans, seq: int, nodes: GpuNodes, stack: Stack, dtype: str
    ) -> None:
        self.z, self.p, self.seq, self.nodes, self.stack = sizes, plans, seq, nodes, stack
        self.peak = nodes.gpu.peak(dtype)
        self.matmul = self.peak * nodes.gpu.clock * stack.matmul
        self.rate = nodes.gpu.bandwidth * stack.memory
        self.processors = nodes.gpu.processors
        self.tokens = plans.micro_batch * seq / plans.cp

    def product(self, rows: Array, columns: Array, depth: Array, count: Array | float = 1.0) -> Array:
        """Seconds of ``count`` products (rows, depth) @ (depth, columns) in 16 bits."""
        tiles = np.ceil(rows / TILE[0]) * np.ceil(columns / TILE[1]) * count
        filled = np.ceil(tiles / self.processors) * self.processors * TILE[0] * TILE[1]
        busy = 2 * filled * depth / self.matmul * (1 + self.stack.depth / depth)
        moved = 2 * count * (rows * depth + depth * columns + rows * columns) / self.rate
        return np.maximum(busy, moved) * self.stack.slowdown

    def passes(self, rows: Array, columns: Array, depth: Array, count: Array | float = 1.0) -> Array:
        """Seconds of a product in forward and in backward, (2, plans): its backward has two products."""
        forward = self.product(rows, columns, depth, count)
        inputs = self.product(rows, depth, columns, count)
        weights = self.product(depth, columns, rows, count)
        return np.stack([forward, inputs + weights])

    def linears(self) -> Array:
        """Seconds of the linear layers of a block, (2, plans)."""
        z, t = self.z, self.p.tp
        first = (2 if z.gated else 1) * z.width
        shapes = (
            ((z.queries + 2 * z.keys) / t, z.hidden),
            (z.hidden, z.queries / t),
            (first / t, z.hidden),
            (z.hidden, z.width / t),
        )
        ones = np.ones(len(self.p))
        return np.add.reduce([self.passes(self.tokens, n * ones, k * ones) for n, k in shapes])

    def attention(self) -> Array:
        """Seconds of the scores, the softmax and the values of a block, (2, plans)."""
        z, p, seq = self.z, self.p, self.seq
        if self.stack.flash is not None:
            # Two products forward and five backward, half of which a causal kernel skips.
            flops = 2 * self.tokens * seq * z.queries / p.tp
            forward = flops / (self.matmul * self.stack.flash) * self.stack.slowdown
            return np.stack([forward, 2.5 * forward])
        ones, heads = np.ones(len(p)), p.micro_batch * z.heads / p.tp
        length = seq / p.cp * ones
        products = self.passes(length, seq * ones, z.head_dim * ones, heads)
        products += self.passes(length, z.head_dim * ones, seq * ones, heads)
        # Bytes of a 16-bit score: the softmax reads and writes it, dropout does with a mask of one byte.
        scores = 2 * heads * seq * length
        return products + np.stack([4.5 * scores, 5.5 * scores]) / self.rate * self.stack.slowdown

    def elementwise(self) -> Array:
        """Seconds of norms, residuals, rotations and activations of a block, (2, plans)."""
        z, p = self.z, self.p
        part, wide = z.hidden / p.split, z.width / p.tp
        if not z.gated:  # Megatron-LM: fused kernels, dropout with its mask, the transposes of the heads
            forward, backward = 22 * part + 28 * z.hidden / p.tp, 22 * part + 36 * z.hidden / p.tp
            moved = np.stack([forward, backward])
        else:
            few = 2 * (p.fused | p.compiled)
            autocast = p.stage != 3
            norms = KERNEL_BYTES[np.maximum(few, 2 * self.stack.fused_norms) + autocast, 0]
            queries, keys, mlp = np.moveaxis(KERNEL_BYTES[few + autocast, 1:], 1, 0)
            features = (norms, part), (queries, z.queries / p.tp), (keys, z.keys / p.tp), (mlp, wide)
            moved = np.add.reduce([each.T * count for each, count in features])
        launch = self.stack.launch * (1 - 0.5 * p.compiled)
        return (moved * self.tokens / self.rate + launch) * self.stack.slowdown

    def link(self, stride: Array, size: Array) -> Array:
        """Bytes/s of a ring over ``size`` ranks that are ``stride`` apart, of each rank in one direction. The
        ranks of a group on one node use the links of that node together."""
        inside = np.clip(self.nodes.gpus_per_node / stride, 1, size)
        between = np.minimum(self.nodes.inside, self.nodes.between * inside)
        crosses = stride * size > self.nodes.gpus_per_node
        return np.where(crosses, between, self.nodes.inside) * self.stack.links

    def collective(self, sent: Array, stride: Array, size: Array) -> Array:
        """Seconds in which each of ``size`` ranks sends ``sent`` bytes, and the latency of their steps."""
        latency = np.where(stride * size > self.nodes.gpus_per_node, self.nodes.link.latency, 1e-6)
        return (size > 1) * (sent / self.link(stride, size) + 2 * (size - 1) * latency)

    def beside(self, traffic: Array, window: Array, least: Array | float = 0.0) -> Array:
        """Seconds that messages add to ``window`` seconds of computation that they travel beside: what does
        not fit into it, ``least`` or more, and what the others take from its multiprocessors."""
        exposed = np.maximum(traffic - window, least)
        taken = np.minimum(CHANNELS * self.nodes.links / self.processors, 1)
        return exposed + (traffic - exposed) * taken

    def tensor(self, linears: Array) -> Array:
        """Seconds of the two all-reduces of a block in each pass, (2, plans), or of their halves with
        sequence parallelism: 8 b s h (t - 1) / t elements in forward and backward together."""
        z, t, ones = self.z, self.p.tp, np.ones(len(self.p))
        whole = 2 * self.collective(2 * (t - 1) / t * self.tokens * z.hidden * self.word, ones, t)
        if not self.stack.hides_tensor:
            return np.stack([whole, whole])
        # The gradients of the inputs of the first linears travel during the products of those of the weights.
        # With sequence parallelism, the other half gathers gradients, and nothing hides it.
        first = z.queries + 2 * z.keys + (2 if z.gated else 1) * z.width
        window = linears[1] / 2 * first / (first + z.queries + z.width)
        hidden = np.where(self.p.sequence_parallel, whole / 2, whole)
        return np.stack([whole, whole - hidden + self.beside(hidden, window)])

    def context(self, attention: Array) -> Array:
        """Seconds of a block that the exchange over cp adds, (2, plans). A ring hides behind attention."""
        z, p = self.z, self.p
        ring = 2 * 2 * self.tokens * z.keys / p.tp * (p.cp - 1)
        heads = 2 * 2 * self.tokens * (z.queries + z.keys) / p.tp * (p.cp - 1) / p.cp
        stride = p.tp
        hidden = np.stack([self.collective(ring, stride, p.cp), self.collective(2 * ring, stride, p.cp)])
        whole = np.stack([self.collective(heads, stride, p.cp)] * 2)
        return np.where(p.context == 0, np.maximum(hidden - attention, 0), whole)

    def experts(self) -> Array:
        """Seconds of the two all-to-alls of a block in one pass."""
        p = self.p
        sent = self.word * self.tokens * self.z.hidden * self.z.top_k * (p.ep - 1) / p.ep
        return 2 * self.collective(sent, p.tp, p.ep)

    def head(self) -> Array:
        """Seconds of the output projection and the loss of a micro-batch, (plans,)."""
        ones, vocab = np.ones(len(self.p)), self.z.vocab / self.p.tp
        products = self.passes(self.tokens, vocab * ones, self.z.hidden * ones).sum(0)
        eager = 36 if self.z.gated else 22  # to fp32, log-softmax, and both in backward
        moved = self.tokens * vocab * np.where(self.p.fused | self.p.compiled, 8, eager)
        return products + moved / self.rate * self.stack.slowdown

    def sends(self) -> Array:
        """Seconds of the messages between stages of a micro-batch: an activation and its gradient for each
        stage of the rank. With scatter/gather, a rank of tp sends its part, and all gather."""
        p, sent = self.p, 2 * self.tokens * self.z.hidden
        stride = p.dp_replicate * p.dp_shard * p.cp * p.tp
        parts = p.tp if self.stack.scatter_gather else p.split
        between = np.where(stride >= self.nodes.gpus_per_node, self.nodes.between, self.nodes.inside)
        gather = np.where(
            p.sequence_parallel, 0, self.collective(sent * (p.tp - 1) / p.tp, np.ones(len(p)), p.tp)
        )
        message = sent / parts / (between * self.stack.sends) + gather * (parts > 1)
        return np.where(p.pp > 1, 2 * p.chunks * message, 0)

    def data(self, owned: Array, forward: Array, backward: Array) -> Array:
        """Seconds of a step for gradients and sharded parameters that computation does not hide.

        Args:
            owned: the parameters of a rank of one copy.
            forward, backward: seconds of a micro-batch on this rank.
        """
        whole, sharded = self.reduced(owned, backward), self.sharded(owned, forward + backward)
        return np.where(self.p.stage == 3, sharded, whole)

    def reduced(self, owned: Array, backward: Array) -> Array:
        """Seconds of a step for the gradients of parameters that every rank has: stages 0 to 2."""
        p, size = self.p, self.p.copies * self.p.cp
        part = (size - 1) / size * owned
        # Stages 1 and 2 reduce to the owner and gather the parameters in fp32 after the step.
        sums = np.where(p.stage == 0, 2, 1) * self.stack.grad_bytes
        reduce = self.collective(sums * part, p.tp, size)
        gather = self.collective(4 * part, p.tp, size) * ((p.stage == 1) | (p.stage == 2))
        last = reduce * self.z.table / p.tp / owned  # the gradient of the embedding, after the backward
        return self.beside(reduce, self.stack.overlap * backward, last) + gather

    def sharded(self, owned: Array, busy: Array) -> Array:
        """Seconds of a step for sharded parameters, stage 3, of which ``busy`` seconds of each micro-batch
        hide the messages, except those of the root, which holds what is outside the blocks."""
        p, one, shards = self.p, self.stack.grad_bytes, self.p.dp_shard * self.p.cp
        root = self.outside()
        # Blocks are gathered again for the backward. A pipeline keeps its parameters whole.
        times, gathered = np.where(p.pp > 1, 1, p.micro_batches), np.where(p.pp > 1, owned, 2 * owned - root)

        def messages(gathered: Array, reduced: Array) -> Array:
            gather = self.collective(2 * gathered * (shards - 1) / shards, p.tp, shards)
            return times * (gather + self.collective(one * reduced * (shards - 1) / shards, p.tp, shards))

        replicas = 2 * one * owned / shards * (p.dp_replicate - 1) / p.dp_replicate
        traffic = messages(gathered, owned) + self.collective(replicas, p.tp * shards, p.dp_replicate)
        # What was gathered is copied into the parameters in bf16, and gradients into the sent buffer.
        copied = times * (shards > 1) * (4 * gathered + (2 + one) * owned) / self.rate
        return copied + self.beside(traffic, self.stack.overlap * busy * times, messages(root, root))

    def optimiser(self, owned: Array) -> Array:
        """Seconds of AdamW on the parameters of a rank, ``owned``, which stage 1 divides over all ranks."""
        p = self.p
        return owned / np.where(p.stage >= 1, p.dp_shard * p.cp, 1) * 28 / self.rate

    def block(self) -> BlockParts:
        """Return the time of a micro-batch on a block."""
        linears, attention = self.linears(), self.attention()
        both = np.ones((2, 1))
        return BlockParts(
            linears=linears,
            attention=attention,
            small=self.elementwise(),
            tensor=self.tensor(linears),
            context=self.context(attention),
            experts=both * self.experts(),
        )

    def recomputed(self, block: BlockParts) -> Array:
        """Seconds of the forward of a block that the backward repeats, (plans,)."""
        again = np.where(self.p.checkpointing == Checkpointing.FULL, block.forward, 0)
        if self.stack.flash is None:
            again = np.where(self.p.checkpointing == Checkpointing.SELECTIVE, block.attention[0], again)
        return again

    def owned(self) -> Array:
        """The parameters of a rank of one copy, (plans,)."""
        z, p = self.z, self.p
        blocks = z.layers / p.pp * (z.block_parameters / p.tp + z.expert_parameters / p.ep)
        return blocks + self.outside()

    def outside(self) -> Array:
        """Those outside the blocks: the embedding and the output projection, or one of them."""
        return self.z.table / self.p.tp * np.where((self.p.pp > 1) | self.z.tied, 1, 2)

    def cost(self) -> StepCost:
        """Return the time of a step by part."""
        z, p, m = self.z, self.p, self.p.micro_batches
        block = self.block()
        again = self.recomputed(block)
        stages = balanced_stages(p, z, self.seq)
        even = z.layers / p.pp
        head, sends, whole = self.head(), self.sends(), block.forward + block.backward + again
        last = stages.last if self.stack.balanced else even
        most = np.maximum(stages.first, last) if self.stack.balanced else even
        # The slowest rank sets the pace: one with the most blocks, or the one with the head.
        with_head = last * whole + head
        without = most * whole
        pace = np.where(p.pp > 1, np.maximum(with_head, without), z.layers * whole + head)
        blocks = np.where(p.pp > 1, np.where(with_head >= without, last, most), z.layers)
        forward = blocks * block.forward + sends / 2
        gradients = blocks * (block.linears[1] / 2)
        inputs = blocks * whole + sends - forward - gradients
        owned = self.owned()
        per_step = m * blocks
        parts = {
            "matrix products": per_step * block.linears.sum(0),
            "attention": per_step * block.attention.sum(0),
            "memory-bound kernels": per_step * block.small.sum(0),
            "recomputation": per_step * again,
            "tensor parallelism": per_step * block.tensor.sum(0),
            "context parallelism": per_step * block.context.sum(0),
            "expert parallelism": per_step * block.experts.sum(0),
            "messages between stages": m * sends,
            "vocabulary head and loss": m * (pace - blocks * whole),
            "pipeline bubble": bubble(p, forward, inputs, gradients),
            "data parallelism": self.data(owned, forward, inputs + gradients),
            "optimiser": self.optimiser(owned),
        }
        tokens = self.seq * p.micro_batch * m * p.copies
        flops = z.flops(1.0, self.seq) * tokens
        return StepCost(parts, flops, p.gpus * self.peak)

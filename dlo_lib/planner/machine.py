"""The same predictions for the machine one sits at: ranks on its CPU cores, whose constants are fitted by
some seconds of training.

    step = max(the slowest rank, the CPU time of all ranks / cores)

A rank is one thread, and all times are CPU times of that thread and of those that move its messages: a rank
does not communicate while it computes, because no core is free for it. At a collective that nothing hides,
ranks wait for each other and for their wake-up, without CPU time. With more ranks than cores, the cores
are shared, which is the second term. The parts of a step are those of ``cost``; each is a count (FLOPs of
products and of attention, bytes of kernels between them, passes of blocks, bytes of AdamW, micro-batches)
times a constant. The constants follow from least squares on steps of small models, with none below 0, on two
ranks at the same time, because cores share their caches and the memory. Those of messages are measured.

What is left out: the input pipeline, checkpoints, and the waits of the scheduler of the operating system.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.planner.calibration import LIBRARY
from dlo_lib.planner.cost import COMPUTED, StepParts
from dlo_lib.planner.plans import Array, Plans
from dlo_lib.planner.sizes import ModelSizes

KINDS = ("reduce", "scatter", "gather", "send", "scatter shards", "gather shards")
"""Collectives of the backend, a message between two ranks, and the messages of sharded data parallelism."""
FORMS = ("unit", "tensor", "ring", "stage")
"""What a form of parallelism adds to each of its messages: hooks, copies and kernels around it."""
COMPUTING = ("product", "attention", "kernel_byte", "block_pass", "optimizer_byte", "micro_batch")


@dataclass(frozen=True)
class CpuMachine:
    """The constants of a machine, in seconds of CPU time.

    Attributes:
        cores: the cores that ranks share.
        product, attention: of a FLOP of a matrix product and of attention.
        kernel_byte: of a byte that kernels between products read or write.
        block_pass: of a pass of a block, without its work: the calls of its kernels.
        optimizer_byte: of a byte that clipping and AdamW read or write.
        micro_batch: of a micro-batch, without its blocks.
        byte: of a byte sent, by the kind of message (``KINDS``).
        call: of a message, without its bytes.
        form: of what a form of parallelism does around a message (``FORMS``).
        wait: in which no rank computes at a collective of tensor parallelism; without CPU time.
    """

    cores: int
    product: float = 0.0
    attention: float = 0.0
    kernel_byte: float = 0.0
    block_pass: float = 0.0
    optimizer_byte: float = 0.0
    micro_batch: float = 0.0
    byte: tuple[float, ...] = (0.0,) * len(KINDS)
    call: tuple[float, ...] = (0.0,) * len(KINDS)
    form: tuple[float, ...] = (0.0,) * len(FORMS)
    wait: float = 0.0


def unit(constant: str) -> CpuMachine:
    """Return a machine whose constant of this name, of ``COMPUTING`` or ``FORMS``, is 1 and all others are 0,
    so that its prediction is a count."""
    if constant in FORMS:
        return CpuMachine(1, form=tuple(float(constant == name) for name in FORMS))
    constants: dict[str, Any] = {constant: 1.0}
    return CpuMachine(1, **constants)


@dataclass(frozen=True)
class MachineCost:
    """Predictions of plans, arrays of shape (plans,): the wall time of a step, the CPU time of the slowest
    rank, and whether the cores limit the step."""

    seconds: Array
    cpu_seconds: Array
    shared: Array


def machine_cost(sizes: ModelSizes, plans: Plans, seq: int, machine: CpuMachine) -> MachineCost:
    """Return the time of a step of each plan on the ranks of a machine, in fp32.

    Args:
        seq: the tokens of a sequence.
    """
    costs = CpuParts(sizes, plans, seq, machine).cost().parts
    # Nothing hides the collectives of tp: all ranks wait for the last one, and for their wake-up.
    waits = 0.0 * plans.tp
    if machine.wait:
        at_collectives = machine_cost(sizes, plans, seq, unit("tensor")).cpu_seconds
        waits = machine.wait * np.where(plans.sequence_parallel, 2, 1) * at_collectives
    path = np.add.reduce(list(costs.values())) + plans.micro_batches * machine.micro_batch
    # All ranks sum the tokens and the loss, and those with different parameters the norm of the gradients.
    numbers = 2 + ((plans.stage > 0) | (plans.tp > 1) | (plans.pp > 1))
    path = path + (plans.gpus > 1) * numbers * machine.call[0]
    busy = path - costs["pipeline bubble"]
    # The stages of a pipeline differ: all together compute what one process computes.
    alone = CpuParts(
        sizes, replace(plans, pp=np.ones_like(plans.pp), chunks=np.ones_like(plans.pp)), seq, machine
    )
    mean = _computed(alone.cost().parts) / plans.pp
    every = plans.gpus * (busy - _computed(costs) + mean)
    path = path + waits
    return MachineCost(np.maximum(path, every / machine.cores), busy, every / machine.cores > path)


def _computed(parts: dict[str, Array]) -> Array:
    return np.add.reduce([parts[name] for name in COMPUTED])


class CpuParts(StepParts):
    """The parts of a step on CPU cores, in fp32."""

    word = 4

    def __init__(self, sizes: ModelSizes, plans: Plans, seq: int, machine: CpuMachine) -> None:
        one = GpuNodes(gpu("h100-80"), 1, link("ndr"), 1)  # for the parts that are not those of a CPU
        stack = replace(LIBRARY, overlap=0.0, hides_tensor=False)
        super().__init__(sizes, plans, seq, one, stack, "fp32")
        self.machine = machine

    def product(self, rows: Array, columns: Array, depth: Array, count: Array | float = 1.0) -> Array:
        """Seconds of ``count`` products (rows, depth) @ (depth, columns)."""
        return 2 * count * rows * columns * depth * self.machine.product

    def attention(self) -> Array:
        """Seconds of attention of a block, (2, plans): two products forward, five backward, of which a
        causal kernel skips half."""
        forward = 2 * self.tokens * self.seq * self.z.queries / self.p.tp * self.machine.attention
        return np.stack([forward, 2.5 * forward])

    def elementwise(self) -> Array:
        """Seconds of norms, residuals, rotations and activations of a block, (2, plans)."""
        z, p = self.z, self.p
        elements = 16 * z.hidden / p.split + 5 * (z.queries + z.keys) / p.tp + 5 * z.width / p.tp
        forward = 4 * elements * self.tokens * self.machine.kernel_byte + self.machine.block_pass
        return np.stack([forward, 2 * forward])

    def head(self) -> Array:
        """Seconds of the output projection and the loss of a micro-batch, (plans,)."""
        ones, vocab = np.ones(len(self.p)), self.z.vocab / self.p.tp
        products = self.passes(self.tokens, vocab * ones, self.z.hidden * ones).sum(0)
        # tp sums the embeddings and the gradient of the last activation, and gathers two numbers of a token.
        other = (self.p.tp - 1) / self.p.tp
        summed = 2 * self.collective(2 * other * self.tokens * self.z.hidden * self.word, ones, self.p.tp)
        summed = summed + self.message("gather", 2 * 4 * self.tokens * other, 1)
        work = products + 4 * 5 * self.tokens * vocab * self.machine.kernel_byte
        return work + (self.p.tp > 1) * summed

    def message(self, kind: str, sent: Array | float, calls: Array | float) -> Array:
        """Seconds of ``calls`` messages in which a rank sends ``sent`` bytes together."""
        index = KINDS.index(kind)
        return np.asarray(sent * self.machine.byte[index] + calls * self.machine.call[index])

    def around(self, form: str) -> float:
        """Seconds that a form of parallelism adds to a message."""
        return self.machine.form[FORMS.index(form)]

    def collective(self, sent: Array, stride: Array, size: Array) -> Array:
        """Seconds of an all-reduce; with sequence parallelism, of its two halves."""
        halves = self.message("scatter", sent / 2, 1) + self.message("gather", sent / 2, 1)
        whole = self.message("reduce", sent, 1)
        sums = np.where(self.p.sequence_parallel, halves, whole)
        return (size > 1) * (sums + self.around("tensor"))

    def context(self, attention: Array) -> Array:
        """Seconds of a block that the exchange over cp adds, (2, plans): nothing hides it."""
        z, p = self.z, self.p
        ring = 2 * self.word * self.tokens * z.keys / p.tp * (p.cp - 1)
        heads = 2 * self.word * self.tokens * (z.queries + z.keys) / p.tp * (p.cp - 1) / p.cp
        sent = np.where(p.context == 0, ring, heads)
        one = self.message("send", sent, p.cp - 1) + (p.cp - 1) * self.around("ring")
        return np.stack([one, 2 * one])

    def sends(self) -> Array:
        """Seconds of the messages between stages of a micro-batch: an activation and its gradient."""
        sent = self.word * self.tokens * self.z.hidden / self.p.split
        one = self.message("send", sent, 1) + self.around("stage")
        return np.where(self.p.pp > 1, 2 * self.p.chunks * one, 0)

    def data(self, owned: Array, forward: Array, backward: Array) -> Array:
        """Seconds of a step for gradients and sharded parameters."""
        p = self.p
        size, shards, m = p.copies * p.cp, p.dp_shard * p.cp, p.micro_batches
        whole, units = 4 * owned, self.z.layers / p.pp + 1
        part = (size - 1) / size * whole
        # What is sent is copied into one buffer, and out of it.
        copied = 2 * whole * self.machine.kernel_byte
        parts = self.message("scatter shards", part, 1) + self.message("gather shards", part, 1)
        reduced = 2 * copied + np.where(p.stage == 0, self.message("reduce", 2 * part, 2), parts)
        inside = (shards - 1) / shards * whole
        uses, times = np.where(p.pp > 1, 1, 2 * m), np.where(p.pp > 1, 1, m)
        copied = copied + units * self.around("unit")
        sharded = uses * (self.message("gather shards", inside, units) + copied)
        sharded = sharded + times * (self.message("scatter shards", inside, units) + copied)
        copies = self.message("reduce", 2 * whole / shards * (p.dp_replicate - 1) / p.dp_replicate, 1)
        sharded = sharded + (p.dp_replicate > 1) * copies
        return (size > 1) * np.where(p.stage == 3, sharded, reduced)

    def optimiser(self, owned: Array) -> Array:
        """Seconds of clipping and AdamW on the parameters of a rank."""
        part = np.where(self.p.stage >= 1, self.p.dp_shard * self.p.cp, 1)
        return 40 * owned / part * self.machine.optimizer_byte

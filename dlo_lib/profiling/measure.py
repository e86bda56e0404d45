"""Peak memory of a training step, measured at true size without its memory: the real step runs on fake tensors.

A fake tensor has a shape, a dtype and a storage of the right size, but no data; ``train_step`` does not notice. What lives when is
recorded by ``MemoryTracker``; the peak is the largest sum. The optimiser's state exists before the step, as in every step but the first.

What is measured is what CUDA would hold. Attention is the flash kernel, which saves its output and one fp32 number per query and head
(arXiv:2205.14135); for fp32 with grouped queries CUDA has no such kernel, and the scores are written out. (A GPU older than Ampere has none
for fp16 either and holds more than is said here.) Not counted: the CUDA context, NCCL's and cuBLAS's own buffers, the allocator's rounding
to 512 bytes and its fragmentation.

Cost: seconds and some tens of MB, whatever the model's size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

from dlo_lib.errors import UserError
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import Phase, Precision, train_step
from dlo_lib.parallel.forms import FORMS, Parallel, Sharded, Spread
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.zero import ShardedOptimizer
from dlo_lib.parallel.zero2 import ShardedDDP
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.profiling.settings import OptimizerStep, StepSettings
from dlo_lib.profiling.tracker import MemoryTracker, Part

GPUS_PER_NODE = 8
"""Ranks that share one copy of the model in hybrid sharding, if there are so many."""


def measure_memory(
    model: str | LlamaConfig,
    batch: int = 1,
    seq: int = 2048,
    precision: str | Precision = "bf16",
    checkpointing: bool = False,
    optimizer: str = "adamw",
    fused: bool | OptimizerStep = True,
    parallel: str | Parallel = "ddp",
    bucket_view: bool = True,
    world_size: int = 1,
) -> MemoryReport:
    """Run one training step of ``model`` on fake tensors and report the memory of one rank.

    Args:
        model: a configuration or its name.
        batch, seq: sequences of this rank and tokens per sequence.
        precision: of matrix products, by autocast over fp32 weights.
        checkpointing: keep only each block's input for backward.
        optimizer: a name in ``settings.OPTIMIZERS``: adamw, sgd or sgd-momentum.
        fused: ``True`` for the fused step, ``False`` for foreach, or an ``OptimizerStep``.
        parallel: "none", "ddp", or sharded: "zero1", "zero2", "fsdp" (which is "zero3"), or "hsdp" with a copy for every 8 ranks. Where
            parameters are sharded, they are gathered in ``precision`` rather than by autocast.
        bucket_view: with DDP, gradients are views of the communication buckets and not copied into them.
        world_size: ranks, of which this process plays the first; the others are pretended.

    Raises:
        UserError: an unknown name, a size below 1, an older PyTorch, or (unless ``parallel`` is none) a process group is in use already.
    """
    chosen = StepSettings.of(model, batch, seq, precision, checkpointing, optimizer, fused, parallel, bucket_view, world_size)
    if TorchVersion(torch.__version__) < "2.9":  # its CPU kernel, which stands for the GPU's, would expand grouped keys and values
        raise UserError(
            f"measure_memory needs torch 2.9 or newer, this is {torch.__version__}: pip install -U torch, or use memory_footprint"
        )
    fake_mode = FakeTensorMode(allow_fallback_kernels=False)  # an operator without a fake kernel must not run on real zeros
    with _pretended_ranks(chosen) as group, fake_mode:
        return record_step(chosen, MemoryTracker(fake_mode, scratch=CUDA_SCRATCH), group)


def record_step(chosen: StepSettings, tracker: MemoryTracker, group: dist.ProcessGroup | None) -> MemoryReport:
    """Build what ``chosen`` describes, of tensors of the surrounding mode, and follow one training step with ``tracker``."""
    with tracker:
        llama = Llama(chosen.config, checkpointing=chosen.checkpointing)
        tracker.claim(llama.parameters(), Part.WEIGHTS)
        _claim_gradients(llama, tracker)  # as autograd leaves them,
        wrapped = FORMS[chosen.parallel].wrap(llama, _spread(chosen, group))
        _claim_units(wrapped, tracker)
        _claim_gradients(llama, tracker)  # and as the hooks of parallel training do
        form = FORMS[chosen.parallel]
        optimizer = form.optimizer(wrapped, llama.parameters(), chosen.optimizer.cls, **chosen.optimizer.arguments(chosen.step))
        _claim_partition(wrapped, optimizer, tracker)
        holder = optimizer.local if isinstance(optimizer, ShardedOptimizer) else optimizer
        assert holder is not None
        _warm_up(optimizer, holder if form.sharded is Sharded.GRADIENTS else optimizer)
        states = (held for state in holder.state.values() for held in state.values() if isinstance(held, Tensor))
        tracker.claim(states, Part.OPTIMIZER_STATE)
        inputs, targets = (torch.zeros(chosen.batch, chosen.seq, dtype=torch.int64) for _ in range(2))
        attention = SDPBackend.MATH if chosen.writes_scores else SDPBackend.FLASH_ATTENTION
        _watch_head(llama, tracker)
        with sdpa_kernel(attention):
            train_step(
                wrapped,
                optimizer,
                [(inputs, targets)],
                precision=chosen.precision,
                group=group,
                on_phase=lambda phase: _enter(phase, tracker, [*llama.parameters(), *_parameters(holder)]),
            )
        return MemoryReport(tuple(tracker.events()))


def _spread(chosen: StepSettings, group: dist.ProcessGroup | None) -> Spread:
    return Spread(
        group,
        compute_dtype=chosen.precision.dtype,
        bucket_view=chosen.bucket_view,
        keep_buffers=False,  # as on the GPU that fake tensors stand for
        shard_size=min(GPUS_PER_NODE, chosen.world_size),
    )


def _flash_backward_scratch(grad: Tensor, query: Tensor, key: Tensor, *rest) -> int:
    """CUDA's kernel sums the query's gradient in fp32, and computes those of keys and values per query head before it adds up groups."""
    expanded = query.numel() * query.element_size() if key.shape[1] != query.shape[1] else 0
    return 4 * query.numel() + 2 * expanded


CUDA_SCRATCH: dict[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward_scratch
}


@contextlib.contextmanager
def _pretended_ranks(chosen: StepSettings) -> Iterator[dist.ProcessGroup | None]:
    """A process group whose collectives return at once, gone afterwards; None where nothing is parallel."""
    if chosen.parallel is Parallel.NONE:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("measure_memory pretends its own ranks: call it where no process group is in use")
    dist.init_process_group("fake", rank=0, world_size=chosen.world_size, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _warm_up(optimizer: torch.optim.Optimizer, holder: torch.optim.Optimizer) -> None:
    """Two steps on gradients from nowhere, as every step but the first finds things: the optimiser with its state, DDP with its buckets
    (which it cuts anew after its first backward). ``holder``: with the parameters that have gradients."""
    for _ in range(2):
        torch.stack([parameter.sum() for parameter in _parameters(holder)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_SCOPES = {
    Phase.FORWARD: Part.ACTIVATIONS,
    Phase.LOSS: Part.LOGITS_AND_LOSS,
    Phase.BACKWARD: Part.LOGITS_AND_LOSS,  # until the gradient leaves the output projection
    Phase.CLIP: Part.STEP_TEMPORARIES,
    Phase.OPTIMIZER: Part.STEP_TEMPORARIES,
    Phase.END: Part.BUFFERS,
}


def _enter(phase: Phase, tracker: MemoryTracker, parameters: Iterable[Tensor]) -> None:
    tracker.phase, tracker.scope = phase, _SCOPES[phase]
    tracker.claim((param.grad for param in parameters if param.grad is not None), Part.GRADIENTS)  # of shards: from no backward


def _claim_gradients(model: Llama, tracker: MemoryTracker) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda held: tracker.claim([held.grad] if held.grad is not None else [], Part.GRADIENTS)  # None: packed by another hook
        )


def _claim_units(model: nn.Module, tracker: MemoryTracker) -> None:
    """Shards are weights; what is gathered, packed and received comes and goes, and is said by the model as it does."""
    if isinstance(model, FSDP):
        tracker.claim((unit.shards for unit in model.units), Part.WEIGHTS)
        for unit in model.units:
            tracker.claim((slot.parts for slot in unit.slots), Part.UNITS)
            for slot in unit.trained:
                slot.whole.register_hook(lambda gradient: tracker.claim([gradient], Part.GRADIENTS))
        model.pool.on_take = lambda message: tracker.claim([message], Part.UNITS)


def _claim_partition(model: nn.Module, optimizer: torch.optim.Optimizer, tracker: MemoryTracker) -> None:
    """Parameters have been moved into flat memory, and gradients leave in packs."""
    if isinstance(optimizer, ShardedOptimizer):
        tracker.claim((bucket.flat for bucket in optimizer.partition.buckets), Part.WEIGHTS)
    if isinstance(model, ShardedDDP):
        model.pool.on_take = lambda message: tracker.claim([message], Part.UNITS)


def _watch_head(model: Llama, tracker: MemoryTracker) -> None:
    """Tell the tracker where the output projection begins in forward and ends in backward."""

    def begins(module: nn.Module, args: tuple[Tensor]) -> None:
        tracker.scope = Part.LOGITS_AND_LOSS
        args[0].register_hook(ends)

    def ends(gradient: Tensor) -> None:
        tracker.scope = Part.ACTIVATIONS

    model.lm_head.register_forward_pre_hook(begins)

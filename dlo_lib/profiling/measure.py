"""Measures the peak memory of a training step of any size, by running the step on fake tensors.

A fake tensor has a shape, a dtype and a storage of the right size, but no data. ``train_step`` runs
unchanged. ``MemoryTracker`` records allocations and releases; the peak is the largest sum. The optimiser
state exists before the step, as in every step except the first.

The result is the memory on CUDA. Attention is the flash kernel, which saves its output and one fp32 number
per query and head (arXiv:2205.14135). For fp32 with grouped queries, CUDA has no flash kernel, and the scores
are written to memory. (A GPU older than Ampere has no flash kernel for fp16 either, and needs more memory
than the result.) Attention over several ranks is counted with this kernel for each block; where
``parallel.context.kernels`` has none, the scores of one block are additional. All experts of a mixture have
equal loads. With ``compile``, what Inductor fuses has no memory (``compiled_memory``). Not counted: the CUDA
context, the buffers of NCCL and cuBLAS, and the rounding (512 bytes) and fragmentation of the allocator.

Cost: seconds, and tens of MB, for a model of any size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlo_lib.base.errors import UserError
from dlo_lib.comm.fake_ranks import fake_ranks
from dlo_lib.kernels import FusedOperation, Kernels, fuse
from dlo_lib.kernels.dispatch import around_twins
from dlo_lib.kernels.llama import loss_options
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.models.moe import moe_layers
from dlo_lib.optim import Phase, Precision, train_step
from dlo_lib.optim.entry import OptimizerStep
from dlo_lib.optim.fp8_blocks import use_fp8
from dlo_lib.parallel.compile import compile_llama, compile_loss
from dlo_lib.parallel.mesh import TOKENS, ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.plan import ParallelPlan, ShortForm, ZeroStage
from dlo_lib.parallel.protocol import local_optimizer
from dlo_lib.profiling.compiled_memory import recording_backend
from dlo_lib.profiling.equal_loads import equal_loads
from dlo_lib.profiling.older_releases import fake_collectives, flash_attention
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.profiling.settings import StepSettings
from dlo_lib.profiling.tracker import MemoryTracker, Part


def measure_memory(
    model: str | LlamaConfig,
    batch: int = 1,
    seq: int = 2048,
    precision: str | Precision = "bf16",
    checkpointing: bool = False,
    optimizer: str = "adamw",
    fused: bool | OptimizerStep = True,
    parallel: str | ShortForm | ParallelPlan = "ddp",
    bucket_view: bool = True,
    world_size: int = 1,
    rank: int = 0,
    kernels: str | Kernels | Collection[FusedOperation] = Kernels.EAGER,
    compile: bool = False,
    fp8: bool = False,
) -> MemoryReport:
    """Run one training step of ``model`` on fake tensors and report the memory of one rank.

    Args:
        model: a configuration or its name.
        batch: the number of sequences of this rank.
        seq: the number of tokens per sequence, of which a rank has 1/cp.
        precision: the precision of matrix products, by autocast over fp32 weights.
        checkpointing: whether only the input of each block is saved for backward.
        optimizer: a name in ``optim.registry.OPTIMIZERS``, such as adamw, sgd-momentum or adamw-in-backward.
            The last one updates a parameter as soon as its gradient is complete, and needs
            ``parallel="none"``.
        fused: ``True`` for the step with the fewest kernels, the fused one if there is one; ``False`` for
            foreach; or an ``OptimizerStep``.
        parallel: "none", "ddp", "zero1", "zero2", "fsdp" (also called "zero3"), "hsdp" with one copy of the
            model for each 8 ranks, or a ``ParallelPlan``. Sharded parameters are gathered in ``precision``,
            without autocast.
            The micro-batches of a pipeline are those of the plan. In its report, the phase FORWARD is the
            whole table of forwards and backwards.
        bucket_view: with DDP, whether gradients are views of the communication buckets.
        world_size: the number of ranks.
        rank: the rank that this process is; the others are simulated. The stages of a pipeline need different
            memory: its first rank has the most micro-batches in flight, and its last one the logits.
        kernels: "eager", "fused", or the operations that are fused (``dlo_lib.kernels``). A fused operation
            counts as one kernel, with its results and without temporary memory. Where a pipeline or ``tp``
            needs the logits, the output projection stays apart from the loss.
        compile: whether the blocks and the loss are compiled, as ``train --compile`` does. This forgets what
            ``torch.compile`` has compiled in this process.
        fp8: whether the linear layers of the blocks have 8-bit products, as with ``train --fp8``. Their saved
            8-bit weights belong to the activations.

    Raises:
        UserError: a name is unknown, a size is below 1, the sequence cannot be divided, there is a process
            group already, unless ``parallel`` is none, or this release of PyTorch cannot compile on fake
            tensors (``compiled_memory.OLDEST``).
    """
    layout = (parallel, bucket_view, world_size, rank, kernels, compile, fp8)
    chosen = StepSettings.of(model, batch, seq, precision, checkpointing, optimizer, fused, *layout)
    # An operator without a fake kernel raises an error, because a fallback would run on real zeros.
    fake_mode = FakeTensorMode(allow_fallback_kernels=False)
    with _fake_ranks(chosen) as group, fake_mode, equal_loads():
        return record_step(chosen, MemoryTracker(fake_mode, scratch=CUDA_SCRATCH), group)


def record_step(
    chosen: StepSettings, tracker: MemoryTracker, group: dist.ProcessGroup | None
) -> MemoryReport:
    """Build the model and the optimiser of ``chosen`` in the current tensor mode, and record one training
    step with ``tracker``.

    Raises:
        UserError: the step is compiled, and this release of PyTorch is older than ``compiled_memory.OLDEST``.
    """
    plan = chosen.plan
    mesh = ParallelMesh(plan.degrees, group) if group is not None else None
    compiler = recording_backend(tracker) if chosen.compile else contextlib.nullcontext()
    with compiler as backend, tracker:
        cuts = plan.pipelined or plan.tp > 1
        llama, wrapped = (_cut_model if cuts else _whole_model)(chosen, mesh, tracker)
        loss = loss_options(chosen.fused, plan.takes_logits)
        if backend is not None:
            compile_llama(wrapped, plan, backend)
            loss = compile_loss(loss, backend)
        _observe(wrapped, tracker)
        _claim_gradients(wrapped, tracker)  # after the hooks of the wrapper
        options = chosen.optimizer.arguments(chosen.step)
        groups = chosen.optimizer.groups(wrapped.named_parameters())
        optimizer = make_optimizer(wrapped, plan, mesh, groups, chosen.optimizer.cls, **options)
        _observe(optimizer, tracker)
        holder = local_optimizer(optimizer)
        _warm_up(
            optimizer,
            holder if plan.stage is ZeroStage.GRADIENTS else optimizer,
            steps=1 if mesh is None else 2,
            shards=plan.stage is ZeroStage.PARAMETERS,
        )
        states = (
            held for state in holder.state.values() for held in state.values() if isinstance(held, Tensor)
        )
        tracker.claim(states, Part.OPTIMIZER_STATE)
        pairs = [
            (inputs, targets)
            for _ in range(plan.micro_batches if plan.pipelined else 1)
            for inputs, targets in [torch.zeros(2, chosen.batch, chosen.tokens, dtype=torch.int64)]
        ]
        writes = chosen.writes_scores
        attention = sdpa_kernel(SDPBackend.MATH) if writes else flash_attention(_flash_backward_scratch)
        _watch_head(llama, tracker)
        if plan.pipelined:  # it has no phases inside
            _enter(Phase.FORWARD, tracker, ())
        with attention, around_twins(tracker.one_kernel):
            train_step(
                wrapped,
                optimizer,
                pairs,
                precision=chosen.precision,
                group=group if mesh is None else mesh.group_along(*TOKENS),
                **loss,
                on_phase=lambda phase: _enter(phase, tracker, [*wrapped.parameters(), *_parameters(holder)]),
            )
        return MemoryReport(tuple(tracker.events()))


def _whole_model(
    chosen: StepSettings, mesh: ParallelMesh | None, tracker: MemoryTracker
) -> tuple[Llama, nn.Module]:
    """Return the model of a plan without ``pp`` and ``tp`` and its wrapper."""
    llama = fuse(Llama(chosen.config, checkpointing=chosen.checkpointing), chosen.fused)
    if chosen.fp8:
        use_fp8(llama)
    tracker.claim(llama.parameters(), Part.WEIGHTS)
    _claim_gradients(llama, tracker)  # before the hooks of the wrapper
    wrapped = parallelize(llama, chosen.plan, mesh)
    if chosen.plan.stage is not ZeroStage.PARAMETERS:
        for layer in moe_layers(llama):  # this rank's part of the experts is a copy
            _claim_cut(layer.experts.parameters(), tracker)
    return llama, wrapped


def _cut_model(
    chosen: StepSettings, mesh: ParallelMesh | None, tracker: MemoryTracker
) -> tuple[Llama, nn.Module]:
    """Return the model of a plan with ``pp`` or ``tp`` and its wrapper. The model is built on the meta
    device, so that only the parts of this rank have memory."""
    plan, config = chosen.plan, chosen.config
    llama = Llama(config, checkpointing=chosen.checkpointing, device="meta")
    fuse(llama, chosen.fused, plan.takes_logits)
    if chosen.fp8:
        use_fp8(llama)
    cpu = torch.device("cpu")
    wrapped = parallelize(
        llama,
        plan,
        mesh,
        device=cpu,
        values=lambda param: torch.empty(param.shape, dtype=param.dtype, device=cpu),
        seq=chosen.seq,
    )
    _claim_cut(wrapped.parameters(), tracker)
    if isinstance(wrapped, Pipeline):
        parts = plan.tp if plan.sequence_parallel else 1
        sharded = plan.stage is ZeroStage.PARAMETERS
        wrapped.simulate_messages(
            (chosen.batch, chosen.tokens),
            (chosen.batch, chosen.tokens // parts, config.hidden),
            chosen.precision.dtype if sharded else torch.float32,
        )
        for stage in wrapped.unwrapped():
            stage.register_forward_pre_hook(lambda _, args: _enter_stage(tracker, args[0]))
    return llama, wrapped


def _claim_cut(parameters: Iterable[nn.Parameter], tracker: MemoryTracker) -> None:
    """Claim parameters that exist since the model was cut, and their gradients."""
    for param in parameters:
        tracker.claim([param], Part.WEIGHTS)
        # A hook of the tensor runs before those of the wrapper, which may pack the gradient.
        param.register_hook(lambda grad: tracker.claim([grad], Part.GRADIENTS))


def _enter_stage(tracker: MemoryTracker, x: Tensor) -> None:
    """Begin the forward of a stage. Its input may have been received in advance, within another scope."""
    tracker.scope = Part.ACTIVATIONS
    if x.is_floating_point():
        tracker.claim([x], Part.ACTIVATIONS)


def _flash_backward_scratch(grad: Tensor, query: Tensor, key: Tensor, *rest) -> int:
    """Return the temporary bytes of the CUDA kernel. It sums the gradient of the queries in fp32, and
    computes the gradients of keys and values for each query head before it sums over the groups."""
    expanded = query.numel() * query.element_size() if key.shape[1] != query.shape[1] else 0
    return 4 * query.numel() + 2 * expanded


CUDA_SCRATCH: dict[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward_scratch
}


@contextlib.contextmanager
def _fake_ranks(chosen: StepSettings) -> Iterator[dist.ProcessGroup | None]:
    """Create a fake process group, whose collectives return immediately, for the duration of the context;
    None if the step needs no group."""
    if chosen.alone:
        yield None
        return
    if dist.is_initialized():
        raise UserError("measure_memory simulates its ranks: call it where no process group is in use")
    with fake_ranks(chosen.world_size, chosen.rank) as group, fake_collectives():
        yield group


def _warm_up(
    optimizer: torch.optim.Optimizer, holder: torch.optim.Optimizer, steps: int, shards: bool
) -> None:
    """Run steps with artificial gradients: one, so that the optimiser has its state, and with ranks another
    one, because DDP rebuilds its buckets. ``holder`` is the optimiser whose parameters have gradients.
    The gradients of FSDP's shards are assigned, because FSDP refuses a backward of a shard."""
    for _ in range(steps):
        if shards:
            for parameter in _parameters(holder):
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        else:
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
    # Claim the gradients of shards here, because they are not the result of a backward.
    tracker.claim((param.grad for param in parameters if param.grad is not None), Part.GRADIENTS)


def _claim_gradients(model: nn.Module, tracker: MemoryTracker) -> None:
    def claim(parameter: Tensor) -> None:
        if parameter.grad is not None:  # None if another hook has packed the gradient
            tracker.claim([parameter.grad], Part.GRADIENTS)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(claim)


class _TrackerObserver:
    """A ``MemoryObserver`` that assigns the reported tensors to parts of the tracker."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    def weights(self, tensors: Iterable[Tensor]) -> None:
        self._tracker.claim(tensors, Part.WEIGHTS)

    def buffers(self, tensors: Iterable[Tensor]) -> None:
        self._tracker.claim(tensors, Part.UNITS)

    def gradients(self, tensors: Iterable[Tensor]) -> None:
        self._tracker.claim(tensors, Part.GRADIENTS)


def _observe(parallel: object, tracker: MemoryTracker) -> None:
    """Connect a wrapper or a sharded optimiser to the tracker. Other objects report nothing."""
    observe = getattr(parallel, "observe_memory", None)
    if observe is not None:
        observe(_TrackerObserver(tracker))


def _watch_head(model: Llama, tracker: MemoryTracker) -> None:
    """Set the scope of the tracker when the output projection begins in forward and when it ends in
    backward."""

    def on_forward(module: nn.Module, args: tuple[Tensor]) -> None:
        tracker.scope = Part.LOGITS_AND_LOSS
        args[0].register_hook(on_backward)

    def on_backward(gradient: Tensor) -> None:
        tracker.scope = Part.ACTIVATIONS

    model.lm_head.register_forward_pre_hook(on_forward)

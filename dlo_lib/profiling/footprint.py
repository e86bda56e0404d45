"""Computes the memory of a training step from formulas, by part, without running it.

Weights, gradients and optimiser state need 4 bytes per parameter each, or a multiple. Backward needs the
activations that each block has saved (``sizes``); with activation checkpointing, it needs the input of each
block and the activations of one block at a time (arXiv:1604.06174). The loss needs three tensors of the size
of the logits in fp32. The step is evaluated at several *moments*, at each of which one of these terms is
largest. The peak of a part is its maximum over the moments, and the peak of a phase is the largest sum within
the phase.

Cost: none. The error is about 2 % of each part for models with the proportions of a Llama (intermediate at
least twice hidden).
"""

from __future__ import annotations

from dataclasses import dataclass

from dlo_lib.base.errors import UserError
from dlo_lib.models import LlamaConfig
from dlo_lib.optim import Phase, Precision
from dlo_lib.optim.entry import OptimizerStep
from dlo_lib.parallel.plan import ParallelPlan, ShortForm, ZeroStage
from dlo_lib.profiling.settings import StepSettings
from dlo_lib.profiling.sizes import (
    FP32,
    ActivationSizes,
    WeightSizes,
    autocast,
    embedding_shapes,
    grouped,
    parameter_shapes,
)
from dlo_lib.profiling.tracker import Part


@dataclass(frozen=True)
class FootprintMoment:
    """The memory at one time in the step, in bytes by part."""

    name: str
    phase: Phase
    held: dict[Part, int]


@dataclass(frozen=True)
class Footprint:
    """The computed memory of one rank over one training step, in bytes. The peaks have the names of
    ``MemoryReport``."""

    moments: tuple[FootprintMoment, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest sum of all parts."""
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[Part, int]:
        """The bytes of each part when the sum is largest."""
        return max((moment.held for moment in self.moments), key=lambda held: sum(held.values()))

    @property
    def peak_by_part(self) -> dict[Part, int]:
        """The peak of each part."""
        return {part: max(moment.held[part] for moment in self.moments) for part in Part}

    @property
    def peak_by_phase(self) -> dict[Phase, int]:
        """The largest sum of all parts within each phase."""
        peaks: dict[Phase, int] = {}
        for moment in self.moments:
            peaks[moment.phase] = max(peaks.get(moment.phase, 0), sum(moment.held.values()))
        return peaks


def memory_footprint(
    model: str | LlamaConfig,
    batch: int = 1,
    seq: int = 2048,
    precision: str | Precision = "bf16",
    optimizer: str = "adamw",
    fused: bool | OptimizerStep = True,
    checkpointing: bool = False,
    parallel: str | ShortForm | ParallelPlan = "ddp",
    world_size: int = 1,
    bucket_view: bool = True,
) -> Footprint:
    """Compute the memory of one rank during a training step. The arguments are those of ``measure_memory``.

    Raises:
        UserError: a name is unknown, a size is below 1, or there is no formula for the form of parallelism.
    """
    layout = (parallel, bucket_view, world_size)
    chosen = StepSettings.of(model, batch, seq, precision, checkpointing, optimizer, fused, *layout)
    if chosen.config.moe is not None:
        raise UserError(
            "no formula by moments for experts: use dlo_lib.planner.plan_memory, or measure_memory"
        )
    if chosen.plan.stage is not ZeroStage.NONE:
        what = parallel if isinstance(parallel, str) else f"ZeRO stage {chosen.plan.stage.value}"
        raise UserError(
            f'no formula by moments for parallel="{what}": use "none" or "ddp", dlo_lib.planner.plan_memory, '
            "or measure_memory"
        )
    if chosen.plan.pipelined or chosen.plan.tp > 1 or chosen.plan.cp > 1:
        raise UserError(
            "no formula by moments for a plan with pp, tp or cp: use dlo_lib.planner.plan_memory, "
            "or measure_memory"
        )
    weights, sizes = WeightSizes.of(chosen), ActivationSizes.of(chosen)
    embeddings = embedding_shapes(chosen.config)
    others = parameter_shapes(chosen.config) - embeddings
    always = {
        Part.WEIGHTS: weights.all,
        Part.OPTIMIZER_STATE: sum(
            count * chosen.optimizer.count_state_bytes(shape, embedding=some is embeddings)
            for some in (others, embeddings)
            for shape, count in some.items()
        ),
        # Inputs and targets are int64
        Part.BUFFERS: 2 * 8 * chosen.batch * chosen.seq + _buckets(chosen, weights),
    }
    changing = [
        *_forward(chosen, weights, sizes),
        *_backward(chosen, weights, sizes),
        *_update(chosen, weights),
    ]
    constant = dict.fromkeys(Part, 0) | always
    return Footprint(tuple(FootprintMoment(name, phase, constant | held) for name, phase, held in changing))


_Change = tuple[str, Phase, dict[Part, int]]


def _buckets(chosen: StepSettings, weights: WeightSizes) -> int:
    """Return the bytes of gradient buckets, if the gradients are not views of them."""
    return weights.all if not chosen.alone and not chosen.plan.bucket_view else 0


def _forward(chosen: StepSettings, weights: WeightSizes, sizes: ActivationSizes) -> list[_Change]:
    layers = chosen.config.num_layers
    # Autocast keeps its copies until the end of forward.
    cast = {Part.CAST_WEIGHTS: layers * weights.cast_block + weights.cast_head}
    kept = layers * _kept(chosen, sizes)
    before_last = (layers - 1) * _kept(chosen, sizes)
    # If the scores are written, they exist before and after the softmax.
    in_attention = before_last + sizes.attention_kept + (sizes.scores if chosen.writes_scores else 0)
    in_mlp = kept + (2 * sizes.residual + 3 * sizes.wide if chosen.checkpointing else 0)
    logits = sizes.logits // 2 if autocast(chosen) else sizes.logits
    upcast = sizes.logits if autocast(chosen) else 0
    at_end = cast | {Part.ACTIVATIONS: kept + sizes.last_norm_kept}
    softmax = logits + upcast + sizes.logits
    return [
        ("last block: attention", Phase.FORWARD, cast | {Part.ACTIVATIONS: in_attention}),
        ("last block: MLP", Phase.FORWARD, cast | {Part.ACTIVATIONS: in_mlp}),
        ("logits", Phase.FORWARD, at_end | {Part.LOGITS_AND_LOSS: sizes.head_input + logits}),
        ("log-softmax", Phase.LOSS, at_end | {Part.LOGITS_AND_LOSS: sizes.head_input + softmax}),
    ]


def _backward(chosen: StepSettings, weights: WeightSizes, sizes: ActivationSizes) -> list[_Change]:
    layers, kept = chosen.config.num_layers, _kept(chosen, sizes)
    cast = 0 if chosen.checkpointing else layers * weights.cast_block
    in_head = {
        Part.CAST_WEIGHTS: cast + weights.cast_head,
        Part.ACTIVATIONS: layers * kept + sizes.last_norm_kept,
    }
    tied, freed = chosen.config.tied_embeddings, chosen.optimizer.in_backward
    # A tied matrix has its gradient at the end of the backward, so that it cannot be freed before.
    after_head = 0 if freed and not tied else weights.vocabulary
    after_block = 0 if freed else weights.block
    # The gradient exists twice while it is copied into its bucket.
    copying = weights.vocabulary if not chosen.alone and chosen.plan.bucket_view else 0
    # The gradient of the output projection exists in low precision and in fp32. The gradient of a tied matrix
    # is not copied before the gradient of the embedding is added.
    head_gradients = {Part.GRADIENTS: weights.vocabulary + max(weights.cast_head, 0 if tied else copying)}
    changes: list[_Change] = [
        # The log-probabilities, their gradient and the gradient of the logits.
        ("loss", Phase.BACKWARD, in_head | {Part.LOGITS_AND_LOSS: sizes.head_input + 3 * sizes.logits}),
        ("head", Phase.BACKWARD, in_head | head_gradients),
        (
            "last norm",
            Phase.BACKWARD,
            {
                Part.GRADIENTS: after_head,
                Part.CAST_WEIGHTS: cast,
                Part.ACTIVATIONS: layers * kept + 6 * sizes.residual,  # the input, and five temporary tensors
            },
        ),
    ]
    # From the last block to the first, activations are freed and gradients are allocated. The sum is
    # therefore largest at the first or at the last block.
    for name, before in (("last block", layers - 1), ("first block", 0)):
        held = {
            Part.GRADIENTS: after_head + (layers - 1 - before) * after_block,
            Part.CAST_WEIGHTS: weights.cast_block * (1 if chosen.checkpointing else before + 1),
        }
        changes += [
            (f"{name}: {half}", Phase.BACKWARD, held | {Part.ACTIVATIONS: before * kept + activations})
            for half, activations in (
                ("MLP", _mlp_backward(sizes)),
                ("attention", _attention_backward(chosen, sizes)),
            )
        ]
    # A tied matrix has one gradient for each of its two uses, and their sum.
    additional = 2 * weights.vocabulary if tied else copying
    complete = weights.vocabulary if freed else weights.all
    at_end = {Part.GRADIENTS: complete + additional, Part.ACTIVATIONS: sizes.residual}
    changes.append(("embedding", Phase.BACKWARD, at_end))
    return changes


def _kept(chosen: StepSettings, sizes: ActivationSizes) -> int:
    """Return the bytes that a block keeps between its forward and its backward."""
    return sizes.residual if chosen.checkpointing else sizes.attention_kept + sizes.mlp_kept


def _mlp_backward(sizes: ActivationSizes) -> int:
    """Return the activations of a block in the backward of its MLP: the saved tensors without the product,
    the gradients of the product and of its two factors, and the gradient of the residual."""
    return sizes.attention_kept + sizes.mlp_kept + 2 * sizes.wide + sizes.residual


def _attention_backward(chosen: StepSettings, sizes: ActivationSizes) -> int:
    """Return the activations of a block in the backward of its attention: the saved tensors, the gradient of
    the residual, and the temporary memory of attention."""
    held = sizes.attention_kept + sizes.residual
    if chosen.writes_scores:
        # The gradients of the scores after and before the softmax, and of the values. Values and output are
        # freed.
        return held + 2 * sizes.scores - sizes.queries
    gradients = 2 * sizes.queries + 2 * sizes.keys  # of output, queries, keys and values
    # The flash kernel sums the gradients of the queries in fp32.
    inside = FP32 * sizes.queries // chosen.precision.dtype.itemsize
    if grouped(chosen.config):
        inside += 2 * sizes.queries  # the gradients of keys and values for every query head
    return held + gradients + inside


def _update(chosen: StepSettings, weights: WeightSizes) -> list[_Change]:
    embeddings = embedding_shapes(chosen.config)
    others = parameter_shapes(chosen.config) - embeddings
    temporaries = chosen.optimizer.steps[chosen.step].peak(others, embeddings)
    gradients = 0 if chosen.optimizer.in_backward else weights.all
    return [
        ("step", Phase.OPTIMIZER, {Part.GRADIENTS: gradients, Part.STEP_TEMPORARIES: temporaries}),
        ("end", Phase.END, {}),
    ]

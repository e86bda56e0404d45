"""The memory of a training step as a formula, by part: what one can know before anything runs.

Nothing is held for long without a reason: weights, gradients and the optimiser's state are 4 bytes a parameter each, or a multiple;
backward needs of every block what its forward kept (``sizes``), with checkpointing only its input and one block at a time in full
(arXiv:1604.06174); the loss needs the logits in fp32, three times over. The step is followed through a few *moments* at which one of
these is at its largest. A part's peak is the largest of its moments, and the peak of a phase the largest sum within it.

Cost: none. Accurate to about 2 % of each part for models of a Llama's proportions (intermediate at least twice hidden).
"""

from __future__ import annotations

from dataclasses import dataclass

from dlo_lib.errors import UserError
from dlo_lib.models import LlamaConfig
from dlo_lib.optim import Phase, Precision
from dlo_lib.profiling.settings import OptimizerStep, Parallel, StepSettings
from dlo_lib.profiling.sizes import FP32, ActivationSizes, WeightSizes, autocast, grouped
from dlo_lib.profiling.tracker import Part


@dataclass(frozen=True)
class Moment:
    """What is held at one instant of the step, in bytes."""

    name: str
    phase: Phase
    held: dict[Part, int]


@dataclass(frozen=True)
class Footprint:
    """The computed memory of one rank over one training step, in bytes; its peaks are named as those of ``MemoryReport``."""

    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest sum of all parts."""
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[Part, int]:
        """What each part holds when the sum is largest."""
        return max((moment.held for moment in self.moments), key=lambda held: sum(held.values()))

    @property
    def peak_by_part(self) -> dict[Part, int]:
        """Each part's own peak."""
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
    parallel: str | Parallel = "ddp",
    world_size: int = 1,
    bucket_view: bool = True,
) -> Footprint:
    """The memory of one rank during a training step; arguments as for ``measure_memory``.

    Raises:
        UserError: an unknown name, a size below 1, or a form of parallel training that has no formula here.
    """
    chosen = StepSettings.of(model, batch, seq, precision, checkpointing, optimizer, fused, parallel, bucket_view, world_size)
    if chosen.parallel not in (Parallel.NONE, Parallel.DDP):
        raise UserError(f'no formula for parallel="{chosen.parallel.value}": use "none" or "ddp", or measure_memory')
    weights, sizes = WeightSizes.of(chosen), ActivationSizes.of(chosen)
    always = {
        Part.WEIGHTS: weights.all,
        Part.OPTIMIZER_STATE: weights.all * chosen.optimizer.states,
        Part.BUFFERS: 2 * 8 * chosen.batch * chosen.seq + _buckets(chosen, weights),  # inputs and targets are int64
    }
    changing = [*_forward(chosen, weights, sizes), *_backward(chosen, weights, sizes), *_update(chosen, weights)]
    return Footprint(tuple(Moment(name, phase, dict.fromkeys(Part, 0) | always | held) for name, phase, held in changing))


_Change = tuple[str, Phase, dict[Part, int]]


def _buckets(chosen: StepSettings, weights: WeightSizes) -> int:
    """Buckets of gradients that are not the gradients themselves."""
    return weights.all if chosen.parallel is Parallel.DDP and not chosen.bucket_view else 0


def _forward(chosen: StepSettings, weights: WeightSizes, sizes: ActivationSizes) -> list[_Change]:
    layers = chosen.config.num_layers
    cast = {Part.CAST_WEIGHTS: layers * weights.cast_block + weights.cast_head}  # autocast keeps its copies until forward ends
    kept = layers * _kept(chosen, sizes)
    before_last = (layers - 1) * _kept(chosen, sizes)
    in_attention = before_last + sizes.attention_kept + (sizes.scores if chosen.writes_scores else 0)  # before and after the softmax
    in_mlp = kept + (2 * sizes.residual + 3 * sizes.wide if chosen.checkpointing else 0)
    logits = sizes.logits // 2 if autocast(chosen) else sizes.logits
    upcast = sizes.logits if autocast(chosen) else 0
    at_end = cast | {Part.ACTIVATIONS: kept + sizes.last_norm_kept}
    return [
        ("last block: attention", Phase.FORWARD, cast | {Part.ACTIVATIONS: in_attention}),
        ("last block: MLP", Phase.FORWARD, cast | {Part.ACTIVATIONS: in_mlp}),
        ("logits", Phase.FORWARD, at_end | {Part.LOGITS_AND_LOSS: sizes.head_input + logits}),
        ("log-softmax", Phase.LOSS, at_end | {Part.LOGITS_AND_LOSS: sizes.head_input + logits + upcast + sizes.logits}),
    ]


def _backward(chosen: StepSettings, weights: WeightSizes, sizes: ActivationSizes) -> list[_Change]:
    layers, kept = chosen.config.num_layers, _kept(chosen, sizes)
    cast = 0 if chosen.checkpointing else layers * weights.cast_block
    in_head = {Part.CAST_WEIGHTS: cast + weights.cast_head, Part.ACTIVATIONS: layers * kept + sizes.last_norm_kept}
    tied = chosen.config.tied_embeddings
    copying = (
        weights.vocabulary if chosen.parallel is Parallel.DDP and chosen.bucket_view else 0
    )  # from autograd's gradient into its bucket
    # The gradient of the output projection, in low precision and then in fp32; a tied one waits for the embedding's.
    head_gradients = {Part.GRADIENTS: weights.vocabulary + max(weights.cast_head, 0 if tied else copying)}
    changes: list[_Change] = [
        # Log-probabilities, their gradient and that of the logits.
        ("loss", Phase.BACKWARD, in_head | {Part.LOGITS_AND_LOSS: sizes.head_input + 3 * sizes.logits}),
        ("head", Phase.BACKWARD, in_head | head_gradients),
        (
            "last norm",
            Phase.BACKWARD,
            {
                Part.GRADIENTS: weights.vocabulary,
                Part.CAST_WEIGHTS: cast,
                Part.ACTIVATIONS: layers * kept + 6 * sizes.residual,  # its input, and five temporaries of one size
            },
        ),
    ]
    # From the last block to the first, activations go and gradients come: the sum is largest at one of the two ends.
    for name, before in (("last block", layers - 1), ("first block", 0)):
        held = {
            Part.GRADIENTS: weights.vocabulary + (layers - 1 - before) * weights.block,
            Part.CAST_WEIGHTS: weights.cast_block * (1 if chosen.checkpointing else before + 1),
        }
        changes += [
            (f"{name}: MLP", Phase.BACKWARD, held | {Part.ACTIVATIONS: before * kept + _mlp_backward(sizes)}),
            (f"{name}: attention", Phase.BACKWARD, held | {Part.ACTIVATIONS: before * kept + _attention_backward(chosen, sizes)}),
        ]
    # A tied matrix has a gradient from each of its two uses, and then their sum.
    beside = 2 * weights.vocabulary if tied else copying
    changes.append(("embedding", Phase.BACKWARD, {Part.GRADIENTS: weights.all + beside, Part.ACTIVATIONS: sizes.residual}))
    return changes


def _kept(chosen: StepSettings, sizes: ActivationSizes) -> int:
    """By a block between its forward and its backward."""
    return sizes.residual if chosen.checkpointing else sizes.attention_kept + sizes.mlp_kept


def _mlp_backward(sizes: ActivationSizes) -> int:
    """A whole block; the product in the MLP is gone, the gradients of it and of its two factors have come, and that of the residual."""
    return sizes.attention_kept + sizes.mlp_kept + 2 * sizes.wide + sizes.residual


def _attention_backward(chosen: StepSettings, sizes: ActivationSizes) -> int:
    """The first half of a block and the gradient of the residual, with what attention computes."""
    held = sizes.attention_kept + sizes.residual
    if chosen.writes_scores:  # gradients after and before the softmax, and of values; values and output are gone
        return held + 2 * sizes.scores - sizes.queries
    gradients = 2 * sizes.queries + 2 * sizes.keys  # of output, queries, keys and values
    inside = FP32 * sizes.queries // chosen.precision.dtype.itemsize  # the flash kernel sums the queries' in fp32,
    if grouped(chosen.config):
        inside += 2 * sizes.queries  # and those of keys and values for every query head
    return held + gradients + inside


def _update(chosen: StepSettings, weights: WeightSizes) -> list[_Change]:
    c = chosen.config
    denominators = {
        OptimizerStep.FUSED: 0,
        OptimizerStep.FOREACH: weights.all,
        # sqrt(v) and its quotient, and the denominator of the parameter before: the three matrices of an MLP follow each other.
        OptimizerStep.FOR_LOOP: max(2 * weights.vocabulary, 3 * FP32 * c.hidden * c.intermediate),
    }
    temporaries = denominators[chosen.step] if chosen.optimizer.denominator else 0
    return [
        ("step", Phase.OPTIMIZER, {Part.GRADIENTS: weights.all, Part.STEP_TEMPORARIES: temporaries}),
        ("end", Phase.END, {}),
    ]

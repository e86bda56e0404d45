"""The memory of a training step as a formula, by part: what one can know before anything runs.

Nothing is held for long without a reason: weights, gradients and the optimiser's state are Psi numbers each; backward needs of every
block what its forward kept; the loss needs the logits in fp32, several times over. The step is followed through a few *moments* at which
one of these is at its largest. A part's peak is the largest of its moments, and the peak of a phase the largest sum within it.

With T = batch * seq tokens, e bytes a number of the matrix products (2 for bf16, 4 for fp32), hidden h, intermediate f, queries
q = num_heads * head_dim and keys k = num_kv_heads * head_dim, a block keeps per token under bf16 (flash attention, arXiv:2205.14135)
    (4h + 4h + 3eh) + e(2q + 2k) + 4 num_heads      block's input, its norm, the inputs of q, k, v; then q, k, v, output and log-sum-exp
    (4h + 4h + 2eh) + 4ef                           the middle of the block, its norm, the inputs of gate and up; the four products
bytes, which is 26h + 4q + 4k + 8f + ...; with checkpointing only the input, 4h, and one block at a time in full (arXiv:1604.06174).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dlo_lib.models import LlamaConfig
from dlo_lib.optim import Phase, Precision
from dlo_lib.profiling.settings import OptimizerStep, Parallel, StepSettings
from dlo_lib.profiling.tracker import Part

FP32 = 4


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

    Accurate to a few per cent for models of a Llama's proportions (intermediate at least twice hidden).

    Raises:
        UserError: an unknown name or a size below 1.
    """
    chosen = StepSettings.of(model, batch, seq, precision, checkpointing, optimizer, fused, parallel, bucket_view, world_size)
    return Footprint(_Step(chosen).moments())


@dataclass(frozen=True)
class _Step:
    """Sizes in bytes. Activations are those of all T tokens."""

    chosen: StepSettings

    # --- the model -------------------------------------------------------------------------------------------------------

    @cached_property
    def element(self) -> int:
        return self.chosen.precision.dtype.itemsize

    @cached_property
    def casts(self) -> bool:
        return self.chosen.precision is not Precision.FP32

    @cached_property
    def block_matrices(self) -> int:
        """Parameters of a block's seven matrices."""
        c = self.chosen.config
        return c.hidden * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.hidden * c.intermediate

    @cached_property
    def vocabulary(self) -> int:
        """Parameters of the embedding, and of the output projection."""
        return self.chosen.config.vocab_size * self.chosen.config.hidden

    @cached_property
    def parameters(self) -> int:
        c = self.chosen.config
        return self.vocabulary * (1 if c.tied_embeddings else 2) + c.num_layers * (self.block_matrices + 2 * c.hidden) + c.hidden

    # --- activations, each for all tokens --------------------------------------------------------------------------------

    @cached_property
    def tokens(self) -> int:
        return self.chosen.batch * self.chosen.seq

    @cached_property
    def residual(self) -> int:
        """One fp32 tensor of the residual stream, (batch, seq, hidden)."""
        return FP32 * self.chosen.config.hidden * self.tokens

    @cached_property
    def queries(self) -> int:
        """(batch, num_heads, seq, head_dim) in the dtype of the matrix products."""
        return self.element * self.chosen.config.num_heads * self.chosen.config.head_dim * self.tokens

    @cached_property
    def keys(self) -> int:
        """(batch, num_kv_heads, seq, head_dim)."""
        return self.queries * self.chosen.config.num_kv_heads // self.chosen.config.num_heads

    @cached_property
    def scores(self) -> int:
        """(batch, num_heads, seq, seq) where they are written out; else the log-sum-exp of each row, (batch, num_heads, seq)."""
        row = self.chosen.seq if self.chosen.writes_scores else 1
        return FP32 * row * self.chosen.config.num_heads * self.tokens

    @cached_property
    def wide(self) -> int:
        """One of the MLP's inner tensors, (batch, seq, intermediate)."""
        return self.element * self.chosen.config.intermediate * self.tokens

    def norm(self, readers: int) -> int:
        """Kept by a norm and for the matrices that read it: the normalised fp32 tensor, 1 / rms, and autocast's copy for each reader."""
        copies = readers * self.element * self.residual // FP32 if self.casts else self.residual
        return self.residual + FP32 * self.tokens + copies

    @cached_property
    def attention_kept(self) -> int:
        """Of the first half of a block: its input, the norm, then queries, keys, values and the output."""
        expanded = self.queries if self.chosen.writes_scores else self.keys  # a key and a value for every query head
        return self.residual + self.norm(readers=3) + 2 * self.queries + 2 * expanded + self.scores

    @cached_property
    def mlp_kept(self) -> int:
        """Of the second half: its input, the norm, then gate, silu(gate), up and their product."""
        return self.residual + self.norm(readers=2) + 4 * self.wide

    @cached_property
    def kept(self) -> int:
        """Kept by each block from forward to backward."""
        return self.residual if self.chosen.checkpointing else self.attention_kept + self.mlp_kept

    # --- moments ---------------------------------------------------------------------------------------------------------

    def moments(self) -> tuple[Moment, ...]:
        return (*self._forward(), *self._backward(), *self._update())

    def _moment(
        self, name: str, phase: Phase, gradients: int = 0, temporaries: int = 0, cast: int = 0, activations: int = 0, logits: int = 0
    ) -> Moment:
        always = {
            Part.WEIGHTS: FP32 * self.parameters,
            Part.OPTIMIZER_STATE: FP32 * self.parameters * self.chosen.optimizer.states,
            Part.BUFFERS: 2 * 8 * self.tokens + self._buckets,
        }
        changing = {
            Part.GRADIENTS: gradients,
            Part.STEP_TEMPORARIES: temporaries,
            Part.CAST_WEIGHTS: cast,
            Part.ACTIVATIONS: activations,
            Part.LOGITS_AND_LOSS: logits,
        }
        return Moment(name, phase, always | changing)

    @cached_property
    def _buckets(self) -> int:
        """Buckets that are not the gradients themselves."""
        return FP32 * self.parameters if self.chosen.parallel is Parallel.DDP and not self.chosen.bucket_view else 0

    @cached_property
    def _logit(self) -> int:
        """Logits at one byte a number."""
        return self.tokens * self.chosen.config.vocab_size

    @cached_property
    def _cast_block(self) -> int:
        return self.element * self.block_matrices if self.casts else 0

    @cached_property
    def _cast_head(self) -> int:
        return self.element * self.vocabulary if self.casts else 0

    @cached_property
    def _last_norm(self) -> int:
        """Kept by the last norm; autocast's copy for the output projection counts with the logits."""
        return self.residual + self.norm(readers=0)

    @cached_property
    def _head_input(self) -> int:
        return self.element * self.residual // FP32 if self.casts else 0

    def _forward(self) -> list[Moment]:
        layers = self.chosen.config.num_layers
        cast = layers * self._cast_block + self._cast_head  # autocast keeps each copy until forward ends
        kept = layers * self.kept
        in_attention = kept - self.kept + self.attention_kept + (self.scores if self.chosen.writes_scores else 0)
        in_mlp = kept + (2 * self.residual + 3 * self.wide if self.chosen.checkpointing else 0)
        logits = self.element * self._logit + self._head_input
        upcast = FP32 * self._logit if self.casts else 0
        return [
            self._moment("last block: attention", Phase.FORWARD, cast=cast, activations=in_attention),
            self._moment("last block: MLP", Phase.FORWARD, cast=cast, activations=in_mlp),
            self._moment("logits", Phase.FORWARD, cast=cast, activations=kept + self._last_norm, logits=logits),
            self._moment(
                "log-softmax", Phase.LOSS, cast=cast, activations=kept + self._last_norm, logits=logits + upcast + FP32 * self._logit
            ),
        ]

    def _backward(self) -> list[Moment]:
        layers, tied = self.chosen.config.num_layers, self.chosen.config.tied_embeddings
        head = FP32 * self.vocabulary
        block = FP32 * self.block_matrices
        cast = self._cast_head + (0 if self.chosen.checkpointing else layers * self._cast_block)
        kept = layers * self.kept
        moments = [
            self._moment(
                "loss",
                Phase.BACKWARD,
                cast=cast,
                activations=kept + self._last_norm,
                logits=3 * FP32 * self._logit + self._head_input,
            ),
            self._moment("head", Phase.BACKWARD, gradients=head + self._cast_head, cast=cast, activations=kept + self._last_norm),
            self._moment(
                "last norm",
                Phase.BACKWARD,
                gradients=head,
                cast=cast - self._cast_head,
                activations=kept + 6 * self.residual,  # its input, and five temporaries
            ),
        ]
        for name, index in (("last block", layers - 1), ("first block", 0)):
            gradients = head + (layers - 1 - index) * block
            cast = self._cast_block * (1 if self.chosen.checkpointing else index + 1)
            # Up to this block's own input; checkpointing has computed the block again.
            before = index * self.kept
            moments += [
                self._moment(f"{name}: MLP", Phase.BACKWARD, gradients, cast=cast, activations=before + self._mlp_backward),
                self._moment(f"{name}: attention", Phase.BACKWARD, gradients, cast=cast, activations=before + self._attention_backward),
            ]
        # A tied matrix has two gradients, from both of its uses, and their sum.
        waiting = 2 * head if tied else 0
        moments.append(self._moment("embedding", Phase.BACKWARD, FP32 * self.parameters + waiting, activations=self.residual))
        return moments

    @cached_property
    def _mlp_backward(self) -> int:
        """The product is gone; its gradient and those of its two factors have come."""
        return self.attention_kept + self.mlp_kept + 2 * self.wide + self.residual

    @cached_property
    def _attention_backward(self) -> int:
        kept = self.attention_kept + self.residual  # and the gradient of the residual stream
        if self.chosen.writes_scores:  # gradients before and after the softmax, and of the values; values and output are gone
            return kept + 2 * self.scores - self.queries
        grouped = self.chosen.config.num_heads != self.chosen.config.num_kv_heads
        gradients = 2 * self.queries + 2 * self.keys  # of the output, queries, keys and values
        inside = FP32 * self.queries // self.element + (2 * self.queries if grouped else 0)
        return kept + gradients + inside

    def _update(self) -> list[Moment]:
        c = self.chosen
        largest = max(self.vocabulary, c.config.hidden * max(c.config.intermediate, c.config.num_heads * c.config.head_dim))
        at_hand = largest if c.step is OptimizerStep.FOR_LOOP else self.parameters
        temporaries = FP32 * at_hand * c.optimizer.temporaries[c.step]
        return [
            self._moment("step", Phase.OPTIMIZER, FP32 * self.parameters, temporaries=temporaries),
            self._moment("end", Phase.END),
        ]

"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.profiling import Moment, OptimizerStep, Part, capacity, memory_footprint
from dlo_lib.profiling.settings import StepSettings
from dlo_lib.profiling.sizes import ActivationSizes


def count_parameters(config: LlamaConfig) -> dict[str, int]:
    """Parameters by part."""
    parts = parameters_by_part(config)
    return {
        "embedding": parts["embedding"],
        "attention": parts["attention"],
        "mlp": parts["mlp"],
        "norms": parts["norm"],
        "head": parts["output"],
    }


def state_bytes(config: LlamaConfig, optimizer: str = "adamw", step: str = "foreach") -> dict[str, int]:
    """What the optimiser's step finds and allocates."""
    held = _moment(config, "step", optimizer=optimizer, fused=OptimizerStep(step)).held
    return {
        "weights": held[Part.WEIGHTS],
        "gradients": held[Part.GRADIENTS],
        "optimizer": held[Part.OPTIMIZER_STATE],
        "temporaries": held[Part.STEP_TEMPORARIES],
    }


def block_bytes(config: LlamaConfig, batch: int, seq: int) -> int:
    """What a block keeps for backward."""
    sizes = _sizes(config, batch, seq)
    return sizes.attention_kept + sizes.mlp_kept


def activation_bytes(config: LlamaConfig, batch: int, seq: int, checkpointing: bool = False) -> dict[str, int]:
    """Activations at the end of forward, and one fp32 tensor of logits."""
    held = _moment(config, "logits", batch=batch, seq=seq, checkpointing=checkpointing).held
    return {"activations": held[Part.ACTIVATIONS], "logits": _sizes(config, batch, seq).logits}


def step_peak(
    config: LlamaConfig,
    batch: int,
    seq: int,
    optimizer: str = "adamw",
    step: str = "foreach",
    checkpointing: bool = False,
    bucket_view: bool = True,
) -> dict[str, int]:
    """The sum of all parts at four moments of the step."""
    moments = {"loss": "log-softmax", "loss gradient": "loss", "last gradient": "embedding", "optimizer step": "step"}
    chosen = {"optimizer": optimizer, "fused": OptimizerStep(step), "checkpointing": checkpointing, "bucket_view": bucket_view}
    return {name: sum(_moment(config, own, batch=batch, seq=seq, **chosen).held.values()) for name, own in moments.items()}


def fits(config: LlamaConfig, card, batch: int, seq: int, step: str = "foreach", **settings) -> bool:
    """Whether the step fits the GPU's usable memory."""
    return capacity.step_fits(config, card, batch, seq, fused=OptimizerStep(step), **settings)


def ranks_needed(config: LlamaConfig, card, global_batch: int, seq: int, step: str = "foreach", **settings) -> int | None:
    """The fewest ranks that can share the global batch."""
    return capacity.ranks_needed(config, card, global_batch, seq, fused=OptimizerStep(step), **settings)


def _moment(config: LlamaConfig, name: str, **settings) -> Moment:
    return next(moment for moment in memory_footprint(config, **settings).moments if moment.name == name)


def _sizes(config: LlamaConfig, batch: int, seq: int) -> ActivationSizes:
    return ActivationSizes.of(StepSettings.of(config, batch, seq, "bf16", False, "adamw", True, "ddp", bucket_view=True, world_size=1))


REFERENCE = {
    "parameters": {"count_parameters": count_parameters},
    "state": {"state_bytes": state_bytes},
    "block": {"block_bytes": block_bytes},
    "activations": {"activation_bytes": activation_bytes},
    "peak": {"step_peak": step_peak},
    "fits": {"fits": fits},
    "largest": {"largest_batch": capacity.largest_batch},
    "ranks": {"ranks_needed": ranks_needed},
}

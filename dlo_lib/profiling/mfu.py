"""Model FLOPs utilisation: how much of a machine's arithmetic goes into the model.

    MFU = tokens/s of all devices * FLOPs per token / (devices * peak FLOP/s)

Only the model's own FLOPs count, forward and backward; what checkpointing computes again does not (that is *hardware* FLOPs utilisation).
Published figures count attention over all seq keys even where the kernel skips the future; so does this one unless told otherwise.

Paper: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B.
"""

from __future__ import annotations

from dlo_lib.errors import UserError
from dlo_lib.hardware import Gpu
from dlo_lib.hardware import gpu as find_gpu
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import AttentionFlops, flops_per_token
from dlo_lib.optim import Precision
from dlo_lib.profiling.settings import named


def mfu(
    tokens_per_second: float,
    model: str | LlamaConfig,
    seq: int,
    gpu: str | Gpu,
    precision: str | Precision = "bf16",
    num_devices: int = 1,
    attention: AttentionFlops = AttentionFlops.FULL,
) -> float:
    """The share of the devices' peak that the model's FLOPs are; above 1 one of the figures is wrong.

    Args:
        tokens_per_second: trained by all devices together.
        seq: tokens per sequence.
        precision: of the matrix products, whose dense peak is taken.
        attention: what of attention's products counts.

    Raises:
        UserError: an unknown name, a GPU without that arithmetic, a count below 1 or a negative speed.
    """
    for name, size in (("seq", seq), ("num_devices", num_devices)):
        if size < 1:
            raise UserError(f"{name} is {size}: use at least 1")
    if tokens_per_second < 0:
        raise UserError(f"tokens_per_second is {tokens_per_second}: use 0 or more")
    device = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    peak = device.peak(named(Precision, "precision", precision).value)
    return tokens_per_second * flops_per_token(model, seq, attention) / (num_devices * peak)

"""Model FLOPs utilisation (MFU): the fraction of the peak arithmetic of the devices that the model uses.

    MFU = tokens/s of all devices * FLOPs per token / (devices * peak FLOP/s)

Only the FLOPs of the forward and backward of the model count. The recomputation of activation checkpointing
does not count (it counts in the *hardware* FLOPs utilisation). Published values count attention over all seq
keys, also if the kernel skips future tokens. This is the default here.

Paper: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B.
"""

from __future__ import annotations

from dlo_lib.base.errors import UserError, require_count
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
    """Return the FLOP/s of the model divided by the peak of the devices. A value above 1 means that an
    argument is wrong.

    Args:
        tokens_per_second: the training throughput of all devices together.
        model: a configuration or its name.
        seq: the number of tokens per sequence.
        gpu: a GPU or its name.
        precision: the precision of the matrix products; its dense peak is used.
        num_devices: the number of devices.
        attention: which FLOPs of attention count.

    Raises:
        UserError: a name is unknown, the GPU does not support the precision, a count is below 1, or the
            throughput is negative.
    """
    for name, size in (("seq", seq), ("num_devices", num_devices)):
        require_count(name, size)
    if tokens_per_second < 0:
        raise UserError(f"tokens_per_second is {tokens_per_second}: use 0 or more")
    device = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    peak = device.peak(named(Precision, "precision", precision).value)
    return tokens_per_second * flops_per_token(model, seq, attention) / (num_devices * peak)

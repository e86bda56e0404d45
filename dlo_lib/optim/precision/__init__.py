"""Low precision: number formats, rounding, loss scaling, master weights, and 8-bit matrix products.

- ``formats``: the formats and their limits
- ``rounding``: rounds a tensor to any of them
- ``plot``: the range of a format with the values of a tensor

16-bit training:

- ``loss_scaling``: keeps the gradients of fp16 in range
- ``master_weights``: keeps the updates that a 16-bit weight would lose

8-bit products:

- ``scaling``: the scale of a tensor
- ``fp8``: emulated products
- ``scaled_products``: products on the tensor cores of a GPU

The modules import no other room.

Papers: P. Micikevicius et al., mixed precision training (arXiv:1710.03740) and FP8 formats
(arXiv:2209.05433); S. Gupta et al., stochastic rounding (arXiv:1502.02551); DeepSeek-V3, scaling by block
(arXiv:2412.19437).
"""

from dlo_lib.optim.precision.formats import FORMATS, FloatFormat
from dlo_lib.optim.precision.fp8 import FP8Linear, fp8_matmul
from dlo_lib.optim.precision.loss_scaling import DynamicLossScaler, StaticLossScaler
from dlo_lib.optim.precision.master_weights import MasterWeights, StochasticRounding
from dlo_lib.optim.precision.plot import plot_range
from dlo_lib.optim.precision.rounding import RoundingLoss, round_to, rounding_loss, stochastic_round
from dlo_lib.optim.precision.scaled_products import ScaledLinear, scaled_matmul
from dlo_lib.optim.precision.scaling import BlockScaling, CurrentScaling, DelayedScaling

__all__ = [
    "FORMATS",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "DynamicLossScaler",
    "FP8Linear",
    "FloatFormat",
    "MasterWeights",
    "RoundingLoss",
    "ScaledLinear",
    "StaticLossScaler",
    "StochasticRounding",
    "fp8_matmul",
    "plot_range",
    "round_to",
    "rounding_loss",
    "scaled_matmul",
    "stochastic_round",
]

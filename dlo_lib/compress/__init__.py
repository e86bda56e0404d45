"""Smaller models: quantization of weights and activations.

- ``grid``: the map between real numbers and integers
- ``packing``: several integers in a byte
- ``calibration``: the range of activations, from batches
- ``weight_only``: linear layers with a stored weight of 8 or 4 bits
- ``int8_linear``: linear layers with an integer product
- ``smoothquant``: moves outliers of activations into weights
- ``awq``: scales weights by activations before they are rounded
- ``gptq``: compensates the error of each rounded column
- ``qat``: training with rounded weights
- ``llama``: quantizes a Llama, block by block

The room imports ``base`` and ``models``.
"""

from dlo_lib.compress.awq import search_awq_factors
from dlo_lib.compress.calibration import MinMaxObserver, MSEObserver, PercentileObserver, channel_absmax
from dlo_lib.compress.gptq import gptq_quantize, hessian
from dlo_lib.compress.grid import (
    IntegerGrid,
    choose_grid,
    dequantize,
    fake_quantize,
    grid_from_range,
    integer_range,
    quantize,
)
from dlo_lib.compress.int8_linear import Int8Linear, StaticInt8Linear, int8_matmul
from dlo_lib.compress.llama import METHODS, plant_outliers, quantize_llama
from dlo_lib.compress.packing import pack_int4, pack_ternary, stored_bytes, unpack_int4, unpack_ternary
from dlo_lib.compress.qat import BitLinear, FakeQuantizedLinear, TernaryLinear, fake_quantize_ste
from dlo_lib.compress.smoothquant import fold_factors, smoothing_factors
from dlo_lib.compress.weight_only import QuantizedEmbedding, QuantizedLinear

__all__ = [
    "METHODS",
    "BitLinear",
    "FakeQuantizedLinear",
    "Int8Linear",
    "IntegerGrid",
    "MSEObserver",
    "MinMaxObserver",
    "PercentileObserver",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "StaticInt8Linear",
    "TernaryLinear",
    "channel_absmax",
    "choose_grid",
    "dequantize",
    "fake_quantize",
    "fake_quantize_ste",
    "fold_factors",
    "gptq_quantize",
    "grid_from_range",
    "hessian",
    "int8_matmul",
    "integer_range",
    "pack_int4",
    "pack_ternary",
    "plant_outliers",
    "quantize",
    "quantize_llama",
    "search_awq_factors",
    "smoothing_factors",
    "stored_bytes",
    "unpack_int4",
    "unpack_ternary",
]

"""Binary floating-point formats: the number of their bits decides their range and their resolution.

A number is sign * 1.mantissa * 2^(exponent - bias). Exponent bits give the range, mantissa bits the
resolution. If all exponent bits are 0, the number is subnormal: 0.mantissa * 2^(1 - bias). The spacing of
subnormal numbers is constant, so their relative error grows towards 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FloatFormat:
    """A format of 1 sign bit, ``exponent_bits`` and ``mantissa_bits``.

    Attributes:
        dtype: the dtype of PyTorch that stores this format; None for tf32, which exists only inside a matrix
            product (its operands are fp32 tensors).
        infinite: whether the largest exponent is reserved for infinity, as IEEE 754 defines it. E4M3 has no
            infinity: it uses this exponent for numbers up to 448, and what is larger becomes NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype | None
    infinite: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_exponent(self) -> int:
        """The exponent of the smallest normal number, a power of two."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """The largest finite number."""
        if self.infinite:
            return (2 - 2**-self.mantissa_bits) * 2.0**self.bias
        return (2 - 2 ** (1 - self.mantissa_bits)) * 2.0 ** (self.bias + 1)  # all bits 1 is NaN

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.smallest_exponent

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.smallest_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def bytes(self) -> int:
        """The bytes in memory: 4 for tf32."""
        return self.dtype.itemsize if self.dtype else 4


FORMATS = {
    entry.name: entry
    for entry in (
        FloatFormat("fp32", 8, 23, torch.float32),
        FloatFormat("tf32", 8, 10, None),
        FloatFormat("fp16", 5, 10, torch.float16),
        FloatFormat("bf16", 8, 7, torch.bfloat16),
        FloatFormat("e4m3", 4, 3, torch.float8_e4m3fn, infinite=False),
        FloatFormat("e5m2", 5, 2, torch.float8_e5m2),
    )
}
"""The formats of GPUs by name. bf16 has the range of fp32 and 8 significant bits; fp16 has 11 and a small
range."""

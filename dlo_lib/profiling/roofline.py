"""The roofline: what limits an operation, the arithmetic or the memory of the device.

An operation with I FLOPs per byte of memory traffic (its arithmetic intensity) reaches at most
    min(peak FLOP/s, I * bandwidth).
Below the ridge, peak / bandwidth, it waits for memory: fewer bytes make it faster, fewer FLOPs do not.
Above it, the arithmetic is the limit.

The ceilings are measured on this machine, because the data sheet is not reached: the best of several matrix
products and copies. FLOPs are counted by PyTorch. The bytes are those of the inputs and outputs, each moved
once, which is the least possible; a kernel that reads them again has a lower intensity in truth.

Paper: S. Williams, A. Waterman, D. Patterson, Roofline (Communications of the ACM 52(4), 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dlo_lib.base.drawing import new_figure
from dlo_lib.base.errors import UserError
from dlo_lib.hardware import Gpu

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Ceilings:
    """The limits of a device: ``flops`` in FLOP/s and ``bandwidth`` in bytes/s."""

    flops: float
    bandwidth: float

    @classmethod
    def of(cls, gpu: Gpu, precision: str) -> Ceilings:
        """Return the limits of the data sheet of ``gpu`` for matrix products in ``precision``."""
        return cls(gpu.peak(precision), gpu.bandwidth)

    @property
    def ridge(self) -> float:
        """The arithmetic intensity at which both limits are equal, FLOPs per byte."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """Return the FLOP/s that an operation of this arithmetic intensity can reach."""
        return min(self.flops, intensity * self.bandwidth)


@dataclass(frozen=True)
class MeasuredOperation:
    """An operation on the roofline.

    Attributes:
        flops: its FLOPs.
        bytes: the bytes of its inputs and outputs.
        seconds: the shortest of its measured times.
    """

    flops: int
    bytes: int
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds

    def limit(self, ceilings: Ceilings) -> str:
        """Return ``"memory"`` or ``"arithmetic"``: which of the two ceilings applies."""
        return "memory" if self.intensity < ceilings.ridge else "arithmetic"

    def efficiency(self, ceilings: Ceilings) -> float:
        """Return the rate divided by what the ceilings allow."""
        return self.rate / ceilings.attainable(self.intensity)


def measure_ceilings(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, size: int = 1024, repeats: int = 5
) -> Ceilings:
    """Measure the FLOP/s of a product of ``size`` x ``size`` matrices and the bandwidth of a copy.

    Args:
        size: the copied tensor has 16 * ``size`` ** 2 elements: it must be larger than the caches.

    Raises:
        UserError: ``size`` or ``repeats`` is below 1.
    """
    if size < 1 or repeats < 1:
        raise UserError(f"size={size}, repeats={repeats}: use at least 1")
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.ones(16 * size**2, device=device, dtype=dtype)
    target = torch.empty_like(source)
    seconds = _shortest(lambda: torch.mm(a, b, out=product), a.device, repeats)
    copied = _shortest(lambda: target.copy_(source), a.device, repeats)
    return Ceilings(2 * size**3 / seconds, 2 * source.nbytes / copied)


def measure_operation(function: Callable[..., Any], *inputs: Tensor, repeats: int = 5) -> MeasuredOperation:
    """Measure ``function(*inputs)``: its FLOPs, the bytes of inputs and outputs, and the shortest time.

    Only FLOPs of matrix products, convolutions and attention are known to PyTorch. An operation without
    them, such as an addition, counts one FLOP for each element of its outputs.

    Raises:
        UserError: there is no tensor among the inputs, or ``repeats`` is below 1.
    """
    if not inputs or repeats < 1:
        raise UserError("give the tensors that the function reads, and at least one repeat")
    with FlopCounterMode(display=False) as counter:
        outputs = function(*inputs)
    every = outputs if isinstance(outputs, tuple | list) else [outputs]
    results = [out for out in every if isinstance(out, Tensor)]
    moved = sum(tensor.nbytes for tensor in [*inputs, *results])
    flops = counter.get_total_flops() or sum(out.numel() for out in results)
    seconds = _shortest(lambda: function(*inputs), inputs[0].device, repeats)
    return MeasuredOperation(flops, moved, seconds)


def plot_roofline(ceilings: Ceilings, operations: Mapping[str, MeasuredOperation]) -> Figure:
    """Draw the two ceilings, and each operation at its intensity and its rate, on logarithmic axes."""
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    places = [ceilings.ridge, *(operation.intensity for operation in operations.values())]
    low, high = min(places) / 4, max(places) * 4
    line = [low, ceilings.ridge, high]
    axes.loglog(line, [ceilings.attainable(x) / 1e9 for x in line], color="#333333", label="ceiling")
    for number, (name, operation) in enumerate(operations.items()):
        axes.loglog(
            [operation.intensity],
            [operation.rate / 1e9],
            marker="osD^v<>"[number % 7],
            linestyle="none",
            label=name,
        )
    axes.axvline(ceilings.ridge, color="#999999", linestyle=":")
    axes.set(xlabel="arithmetic intensity (FLOPs per byte)", ylabel="GFLOP/s", xlim=(low, high))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure


def _shortest(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the shortest of ``repeats`` times of ``function``, after one call that is not measured."""
    function()
    times = []
    for _ in range(repeats):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)

"""GPUs by name, from ``gpus.toml``, which gives the public source of every figure.

The tensors of a process must fit in the *usable* memory, which is less than the nominal memory:
    usable = visible - CUDA context - NCCL buffers
where visible is the memory that CUDA reports. Peak FLOP/s are dense. The figures "with sparsity" of the data
sheets are twice as large and would halve the MFU."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name

_GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    Attributes:
        name: as in ``gpus()``, such as "a100-80".
        title: its full name.
        memory_bytes: the memory that CUDA reports.
        usable_bytes: the memory for tensors, without the CUDA context and the buffers of NCCL.
        bandwidth: of the memory, bytes/s.
        nvlink_bandwidth, pcie_bandwidth: in one direction, all links together, bytes/s.
        peak_flops: dense FLOP/s by dtype ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"); a dtype
            that the chip lacks is absent.
        processors: its streaming multiprocessors.
        watts: its power limit.
        sources: the sources of the figures, by field of ``gpus.toml``.
        clock: the clock of matrix products, relative to that at the power limit of the data sheet.
    """

    name: str
    title: str
    memory_bytes: int
    usable_bytes: int
    bandwidth: float
    nvlink_bandwidth: float
    pcie_bandwidth: float
    peak_flops: dict[str, float]
    processors: int
    watts: float
    sources: dict[str, str]
    clock: float = 1.0

    def peak(self, dtype: str) -> float:
        """Return the dense FLOP/s of matrix products in ``dtype``.

        Raises:
            UserError: the GPU does not support ``dtype``.
        """
        if dtype not in self.peak_flops:
            raise UserError(f"{self.name} has no native {dtype}: use {' or '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def limited(self, watts: float) -> Gpu:
        """Return this GPU with a lower power limit, at which matrix products have the clock f that it allows:
        power grows with f V^2, and the voltage V with f (Mudge, Power: a first-class architectural design
        constraint, 2001), so that f grows with the cube root of the power.

        Raises:
            UserError: ``watts`` is not above 0, or above the present limit.
        """
        if not 0 < watts <= self.watts:
            raise UserError(f"watts is {watts}: use more than 0 and at most {self.watts}, the limit")
        return replace(self, watts=watts, clock=self.clock * (watts / self.watts) ** (1 / 3))


def gpu(name: str) -> Gpu:
    """Return the GPU with this name, in upper or lower case.

    Raises:
        UserError: the name is unknown; the message suggests the nearest names.
    """
    known = _table()
    if name.lower() not in known:
        raise unknown_name("GPU", name, known)
    return known[name.lower()]


def gpus() -> dict[str, Gpu]:
    """Return all GPUs by name, the oldest first."""
    return dict(_table())


@cache
def _table() -> dict[str, Gpu]:
    table = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8"))
    reserved = table["reserved"]
    kept_gib = reserved["cuda_context_gib"] + reserved["nccl_buffers_gib"]
    return {
        name: Gpu(
            name=name,
            title=row["title"],
            memory_bytes=round(row["visible_gib"] * _GIB),
            usable_bytes=round((row["visible_gib"] - kept_gib) * _GIB),
            bandwidth=row["bandwidth"],
            nvlink_bandwidth=row["nvlink"],
            pcie_bandwidth=row["pcie"],
            peak_flops=row["peak_flops"],
            processors=row["processors"],
            watts=row["watts"],
            sources=row["sources"] | reserved["sources"],
        )
        for name, row in table["gpu"].items()
    }

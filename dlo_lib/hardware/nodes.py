"""A machine to train on: GPUs, the links inside and between its nodes, and what an hour costs.

The description of a site creates it (``cluster.site.description.Site.nodes``), and the planner reads it, so
that the planner knows no sites.

    GPU hours = GPUs * hours        energy = GPU hours * watts of a GPU        CO2 = energy * g CO2/kWh
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dlo_lib.base.errors import UserError, require_count, unknown_name
from dlo_lib.hardware.gpus import Gpu

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class FabricLink:
    """One port between nodes: its name, bytes/s in one direction, seconds of a small message, and the
    sources of these figures."""

    name: str
    title: str
    bandwidth: float
    latency: float
    sources: dict[str, str]


def link(name: str) -> FabricLink:
    """Return the link between nodes with this name, such as "hdr".

    Raises:
        UserError: the name is unknown; the message suggests the nearest names.
    """
    known = links()
    if name.lower() not in known:
        raise unknown_name("link between nodes", name, known)
    return known[name.lower()]


@cache
def links() -> dict[str, FabricLink]:
    """Return all links between nodes by name (``links.toml``)."""
    table = tomllib.loads((Path(__file__).parent / "links.toml").read_text(encoding="utf-8"))
    return {name: FabricLink(name=name, **row) for name, row in table["link"].items()}


@dataclass(frozen=True)
class GpuNodes:
    """Nodes of equal GPUs.

    Args:
        gpu: the GPU.
        gpus_per_node: the GPUs of a node, which share its fast links.
        link: one port between nodes.
        links: the ports of a node.
        nvlink: whether the GPUs of a node are connected by NVLink; otherwise by PCIe.
        co2_per_kwh: grams of CO2 that a kWh emits; None if unknown.
        price: of a GPU hour, in any currency; None if unknown.

    Raises:
        UserError: a count is below 1.
    """

    gpu: Gpu
    gpus_per_node: int
    link: FabricLink
    links: int
    nvlink: bool = True
    co2_per_kwh: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        require_count("gpus_per_node", self.gpus_per_node)
        require_count("links", self.links)

    @property
    def inside(self) -> float:
        """Bytes/s that a GPU sends to the other GPUs of its node, in one direction."""
        return self.gpu.nvlink_bandwidth if self.nvlink else self.gpu.pcie_bandwidth

    @property
    def between(self) -> float:
        """Bytes/s of each GPU to other nodes if all GPUs of its node send, in one direction."""
        return self.link.bandwidth * self.links / self.gpus_per_node


def energy_kwh(gpu: Gpu, gpus: int, hours: float) -> float:
    """Return the energy of ``gpus`` GPUs at their power limit, kWh: an upper bound, without the rest of the
    nodes."""
    return gpus * hours * gpu.watts / 1000


@dataclass(frozen=True)
class RunCost:
    """What a run takes: GPU hours, kWh of the GPUs at their power limit, and the grams of CO2 and the price
    where the machine states them."""

    gpu_hours: float
    kwh: float
    co2_grams: float | None
    price: float | None


def run_cost(machine: GpuNodes, gpus: int, hours: float) -> RunCost:
    """Return what ``gpus`` GPUs of ``nodes`` take in ``hours``.

    Raises:
        UserError: ``gpus`` is below 1, or ``hours`` is negative.
    """
    require_count("gpus", gpus)
    if hours < 0:
        raise UserError(f"hours is {hours}: use 0 or more")
    kwh = energy_kwh(machine.gpu, gpus, hours)
    return RunCost(
        gpu_hours=gpus * hours,
        kwh=kwh,
        co2_grams=None if machine.co2_per_kwh is None else kwh * machine.co2_per_kwh,
        price=None if machine.price is None else gpus * hours * machine.price,
    )

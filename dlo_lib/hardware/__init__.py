"""The properties of GPUs and of the machines that they form, as data.

- ``gpus``: reads ``gpus.toml`` (memory, bandwidth, and peak FLOP/s by dtype)
- ``recognise``: finds the GPU of this machine in the table
- ``nodes``: nodes, the links between them (``links.toml``), energy, CO2 and price

The room imports no other room.
"""

from dlo_lib.hardware.gpus import Gpu, gpu, gpus
from dlo_lib.hardware.nodes import FabricLink, GpuNodes, RunCost, energy_kwh, link, links, run_cost
from dlo_lib.hardware.recognise import recognise

__all__ = [
    "FabricLink",
    "Gpu",
    "GpuNodes",
    "RunCost",
    "energy_kwh",
    "gpu",
    "gpus",
    "link",
    "links",
    "recognise",
    "run_cost",
]

"""The properties of GPUs, as data.

- ``gpus``: reads ``gpus.toml`` (memory, bandwidth, and peak FLOP/s by dtype)
- ``recognise``: finds the GPU of this machine in the table

The room imports no other room.
"""

from dlo_lib.hardware.gpus import Gpu, gpu, gpus
from dlo_lib.hardware.recognise import recognise

__all__ = ["Gpu", "gpu", "gpus", "recognise"]

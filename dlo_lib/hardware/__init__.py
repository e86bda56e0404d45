"""What the machines are: GPUs as data."""

from dlo_lib.hardware.gpus import Gpu, gpu, gpus

__all__ = ["Gpu", "gpu", "gpus"]

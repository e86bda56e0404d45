"""What the machines are: GPUs as data."""

from dlo_lib.hardware.gpus import Gpu, gpu, gpus
from dlo_lib.hardware.recognise import recognise

__all__ = ["Gpu", "gpu", "gpus", "recognise"]

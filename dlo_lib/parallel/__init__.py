"""Ways to spread one training step over ranks."""

from dlo_lib.parallel.ddp import DDP

__all__ = ["DDP"]

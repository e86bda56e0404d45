"""Ways to spread one training step over ranks."""

from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.fsdp import FSDP

__all__ = ["DDP", "FSDP"]

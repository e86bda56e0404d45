"""Notebooks that were released before ``base`` existed import this module; new ones import ``base``."""

from dlo_lib.base.torch_compat import grouped_mm, pytorch_ring, pytorch_ring_backward

__all__ = ["grouped_mm", "pytorch_ring", "pytorch_ring_backward"]

"""Notebooks that were released before ``base`` existed import this module; new ones import ``labkit``."""

from dlo_lib.base.text import columns, tr

__all__ = ["columns", "tr"]

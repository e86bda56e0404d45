"""Notebooks that were released before ``base`` existed import this module; new ones import ``labkit``."""

from dlo_lib.base.errors import UserError

__all__ = ["UserError"]

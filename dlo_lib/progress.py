"""How far a run is, for programs of users (``slurm/README.md``); the module is ``base.progress``."""

from dlo_lib.base.progress import report

__all__ = ["report"]

"""A run that is asked to stop, for programs of users (``slurm/README.md``); the module is ``base.stop``."""

from dlo_lib.base.stop import EXIT_STOPPED, StopRequests

__all__ = ["EXIT_STOPPED", "StopRequests"]

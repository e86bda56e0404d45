"""What a training step costs: memory measured and computed, FLOPs and their utilisation."""

from dlo_lib.models.counts import flops_per_token, parameters
from dlo_lib.profiling.capacity import largest_batch, ranks_needed, step_fits
from dlo_lib.profiling.footprint import Footprint, Moment, memory_footprint
from dlo_lib.profiling.measure import measure_memory
from dlo_lib.profiling.mfu import mfu
from dlo_lib.profiling.plot import plot_memory
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.profiling.settings import OPTIMIZERS, OptimizerStep, Parallel
from dlo_lib.profiling.tracker import Event, MemoryTracker, Part

__all__ = [
    "OPTIMIZERS",
    "Event",
    "Footprint",
    "MemoryReport",
    "MemoryTracker",
    "Moment",
    "OptimizerStep",
    "Parallel",
    "Part",
    "flops_per_token",
    "largest_batch",
    "measure_memory",
    "memory_footprint",
    "mfu",
    "parameters",
    "plot_memory",
    "ranks_needed",
    "step_fits",
]

"""What a training step costs: memory measured and computed, FLOPs and their utilisation."""

from dlo_lib.profiling.measure import OptimizerStep, measure_memory
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.profiling.tracker import Event, MemoryTracker, Part

__all__ = ["Event", "MemoryReport", "MemoryTracker", "OptimizerStep", "Part", "measure_memory"]

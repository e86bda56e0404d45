"""The cost of a training step: measured and computed memory, FLOPs and their utilisation.

``measure`` runs a step on fake tensors or on a device (``older_releases``: what PyTorch before 2.10 lacks for
it), and ``tracker`` records its memory. ``footprint`` and ``capacity`` compute the memory. ``mfu`` computes
the utilisation. ``chronometer``, ``step_profile`` and ``loader_profile`` measure time, ``trace_events`` reads
a trace, and ``roofline`` says what limits the time. ``batch_memory`` measures memory against the batch,
``technical_check`` draws all of it on one page. The ``compile_*`` modules inspect ``torch.compile``. Imports
``parallel``, ``optim``, ``models``, ``launch`` and ``hardware``.
"""

from dlo_lib.models.counts import flops_per_token, parameters
from dlo_lib.profiling.batch_memory import largest_measured_batch, memory_of_batches, step_peak
from dlo_lib.profiling.capacity import largest_batch, ranks_needed, step_fits
from dlo_lib.profiling.chronometer import Chronometer, PhaseTime
from dlo_lib.profiling.footprint import Footprint, FootprintMoment, memory_footprint
from dlo_lib.profiling.loader_profile import LoaderProfile, profile_loader
from dlo_lib.profiling.measure import measure_memory
from dlo_lib.profiling.mfu import mfu
from dlo_lib.profiling.plot import plot_memory
from dlo_lib.profiling.report import MemoryReport
from dlo_lib.profiling.roofline import (
    Ceilings,
    MeasuredOperation,
    measure_ceilings,
    measure_operation,
    plot_roofline,
)
from dlo_lib.profiling.settings import OPTIMIZERS, OptimizerStep
from dlo_lib.profiling.step_profile import StepProfile, profile_steps
from dlo_lib.profiling.technical_check import TechnicalCheck, technical_check
from dlo_lib.profiling.trace_events import (
    TraceEvent,
    covered,
    overlap,
    phase_times,
    read_trace,
    self_times,
)
from dlo_lib.profiling.tracker import MemoryEvent, MemoryTracker, Part

__all__ = [
    "OPTIMIZERS",
    "Ceilings",
    "Chronometer",
    "Footprint",
    "FootprintMoment",
    "LoaderProfile",
    "MeasuredOperation",
    "MemoryEvent",
    "MemoryReport",
    "MemoryTracker",
    "OptimizerStep",
    "Part",
    "PhaseTime",
    "StepProfile",
    "TechnicalCheck",
    "TraceEvent",
    "covered",
    "flops_per_token",
    "largest_batch",
    "largest_measured_batch",
    "measure_ceilings",
    "measure_memory",
    "measure_operation",
    "memory_footprint",
    "memory_of_batches",
    "mfu",
    "overlap",
    "parameters",
    "phase_times",
    "plot_memory",
    "plot_roofline",
    "profile_loader",
    "profile_steps",
    "ranks_needed",
    "read_trace",
    "self_times",
    "step_fits",
    "step_peak",
    "technical_check",
]

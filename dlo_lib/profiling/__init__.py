"""The cost of a training step: measured and computed memory, FLOPs and their utilisation.

The memory of a step:

- ``settings``: what determines it; the formula and the measurement share them
- ``measure``: measures it, on fake tensors or on a device
- ``tracker``: records the storages of running code
- ``compiled_memory``: what the graphs of ``torch.compile`` allocate
- ``report``: the result of a measurement
- ``plot``: memory over a step, by part
- ``footprint``: computes it from formulas
- ``sizes``: the sizes of tensors in the formulas
- ``capacity``: whether a step fits, and the largest batch
- ``batch_memory``: the measured memory against the batch
- ``equal_loads``: experts on fake tensors
- ``older_releases``: what fake tensors lack before PyTorch 2.10

The time of a step:

- ``mfu``: utilisation of the FLOPs
- ``chronometer``: phases of a step
- ``step_profile``: where the time is spent
- ``trace_events``: the events of a trace
- ``loader_profile``: what a DataLoader costs
- ``roofline``: what limits an operation
- ``technical_check``: all of it on one page

``torch.compile``:

- ``compile_watch``: graphs, breaks and seconds while code runs
- ``compile_reasons``: the causes and cures of breaks
- ``compile_time``: when the compilation has paid off
- ``compile_capture``: each graph as plain data
- ``operation_capture``: the operations of a function, in order
- ``compile_code``: the kernels of Inductor
- ``compile_warm``: loads Dynamo

Imports ``parallel``, ``kernels``, ``optim``, ``models``, ``launch``, ``comm`` and ``hardware``.
"""

from dlo_lib.models.counts import flops_per_token, parameters
from dlo_lib.optim.entry import OptimizerStep
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

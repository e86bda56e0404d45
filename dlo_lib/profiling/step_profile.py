"""Where the time of a training step is spent, by PyTorch's profiler, with the bottleneck named in a sentence.

``profile_steps`` runs a few steps under ``torch.profiler`` and divides the time of the main thread:

    data        waiting for the DataLoader
    copies      copying tensors, between dtypes, layouts or devices
    waiting     waiting for the device, because a value is read on the CPU (``item``, ``print``)
    optimizer   the optimiser step
    operators   all other operators, forward and backward
    python      the rest: Python code, and starting operators

On a GPU, operators return before the device has computed: the time that the device is busy is reported
beside the parts. Regions of ``record_function`` ("forward", "backward") divide the same time a second time,
by the phases that the program names.

The trace is written to a file that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open, and that
``trace_events.read_trace`` reads. TensorBoard shows it only with the plugin ``torch-tb-profiler``, which
PyTorch has deprecated (version 0.4.3 works with TensorBoard 2.21). ``StepProfile.to_tensorboard`` therefore
writes the parts, the phases and the sentence as ordinary scalars and text, which need no plugin.

The profiler itself costs some microseconds for each operator, so that ``python`` is somewhat too large.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from dlo_lib.base.errors import UserError

_CURES = {
    "data": "use more workers and prefetching, or make the transforms cheaper",
    "copies": "keep tensors on the device and in one dtype, pin memory and copy with non_blocking=True",
    "waiting": "read values less often: remove item() and print from the step",
    "optimizer": "use fused=True or foreach=True",
    "operators": "the step computes: compare its largest operators with the roofline",
    "python": "use larger batches, fewer and larger operators, or torch.compile",
}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::to", "aten::contiguous", "aten::clone"}
_OF_PYTORCH = ("ProfilerStep", "Optimizer.", "enumerate(DataLoader)", "autograd::")
"""How the names of regions begin that PyTorch itself creates."""
_WAITING = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}


@dataclass(frozen=True)
class ProfiledEvent:
    """One operator or region of the main thread.

    Attributes:
        name: as PyTorch reports it.
        begin, seconds: start and duration, in seconds.
        own: the duration without the events within it.
        region: whether it is a region of ``record_function``.
    """

    name: str
    begin: float
    seconds: float
    own: float
    region: bool = False


@dataclass(frozen=True)
class StepProfile:
    """The parts of a step.

    Attributes:
        seconds: the wall time of a step.
        parts: the seconds of each part, as in the module's table; they add up to ``seconds``.
        operators: the number of operators in a step.
        largest: the seconds in a step of the five operators with the most time, by name. The time of
            operators that they call does not count.
        device_seconds: the time that the GPU was busy in a step; None without a GPU.
        trace: the file for Perfetto; None if no folder was given.
        phases: the seconds in a step of each region of ``record_function``, by name.
    """

    seconds: float
    parts: dict[str, float]
    operators: float
    largest: dict[str, float]
    device_seconds: float | None = None
    trace: Path | None = None
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """The part with the most time."""
        return max(self.parts, key=lambda part: self.parts[part])

    def explained(self) -> str:
        """Return a sentence that names the bottleneck, its evidence and a cure."""
        part = self.bottleneck
        share = self.parts[part] / self.seconds
        name, own = next(iter(self.largest.items()), ("no operator", 0.0))
        evidence = {
            "python": f"{self.operators:.0f} operators start in it",
            "operators": f"{name} takes {own / self.seconds:.0%}",
        }.get(part, f"all operators together take {self.parts['operators'] / self.seconds:.0%}")
        idle = ""
        if self.device_seconds is not None:
            idle = f" The GPU is idle for {max(0.0, 1 - self.device_seconds / self.seconds):.0%} of the step."
        what = {"python": "Python code between operators", "waiting": "waiting for the device"}.get(
            part, part
        )
        longest = ""
        if self.phases:
            phase = max(self.phases, key=lambda name: self.phases[name])
            longest = f" The longest phase is {phase}, {self.phases[phase] / self.seconds:.0%} of the step."
        return (
            f"{share:.0%} of the {self.seconds * 1e3:.1f} ms of a step is {what}; {evidence}.{longest}{idle} "
            f"{_CURES[part][0].upper()}{_CURES[part][1:]}."
        )

    def to_tensorboard(self, folder: str | Path, step: int = 0) -> None:
        """Write the parts and phases in ms (scalars) and the sentence (text) to an event file of TensorBoard.

        Args:
            step: the position on the horizontal axis, such as the number of an attempt.

        Raises:
            UserError: the package tensorboard is missing.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "writing for TensorBoard needs the package tensorboard: pip install tensorboard"
            ) from error
        with SummaryWriter(str(folder)) as writer:
            writer.add_text("step/bottleneck", self.explained(), step)
            writer.add_scalar("step/total_ms", 1e3 * self.seconds, step)
            for kind, times in (("part", self.parts), ("phase", self.phases)):
                for name, seconds in times.items():
                    writer.add_scalar(f"{kind}/{name}_ms", 1e3 * seconds, step)

    @classmethod
    def of(cls, events: Iterable[ProfiledEvent], steps: int, **more: Any) -> StepProfile:
        """Divide the time of ``steps`` steps, which are events with names that begin with
        ``ProfilerStep``."""
        sums = dict.fromkeys(_CURES, 0.0)
        own: dict[str, float] = {}
        phases: dict[str, float] = {}
        whole, count, covered_until = 0.0, 0, float("-inf")
        for event in sorted(events, key=lambda event: (event.begin, -event.seconds)):
            if event.name.startswith("ProfilerStep"):
                whole += event.seconds
                sums["python"] += event.own
                continue
            if event.region and not event.name.startswith(_OF_PYTORCH):
                phases[event.name] = phases.get(event.name, 0.0) + event.seconds
            count += event.name.startswith("aten::")
            if event.begin < covered_until:
                continue  # within a region that counts as a whole
            part = _part(event.name)
            if part in ("data", "optimizer", "copies", "waiting"):
                covered_until = event.begin + event.seconds
                sums[part] += event.seconds
            else:
                sums[part] += event.own
            if part == "operators":
                own[event.name] = own.get(event.name, 0.0) + event.own
        largest = sorted(own, key=lambda name: -own[name])[:5]
        return cls(
            whole / steps,
            {part: seconds / steps for part, seconds in sums.items()},
            count / steps,
            {name: own[name] / steps for name in largest},
            phases={name: seconds / steps for name, seconds in phases.items()},
            **more,
        )


def _part(name: str) -> str:
    if name.startswith("enumerate(DataLoader)"):
        return "data"
    if name.startswith("Optimizer.step"):
        return "optimizer"
    if name in _COPIES:
        return "copies"
    if name in _WAITING or name.endswith("Synchronize"):
        return "waiting"
    return "operators" if name.startswith("aten::") else "python"


def profile_steps(
    step: Callable[[], object], steps: int = 5, warmup: int = 2, folder: str | Path | None = None
) -> StepProfile:
    """Run ``step`` ``warmup + steps`` times and return the parts of the last ``steps``.

    Args:
        step: reads a batch from its loader and trains one step.
        folder: where to write the trace; None writes none.

    Raises:
        UserError: ``steps`` or ``warmup`` is below 1.
    """
    if steps < 1 or warmup < 1:
        raise UserError(f"steps={steps}, warmup={warmup}: use at least 1; the first steps are slower")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports each start on stderr otherwise
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    write = tensorboard_trace_handler(str(folder)) if folder is not None else None
    before = set(Path(folder).glob("*.json")) if folder is not None else set()
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1),
        on_trace_ready=write,
        acc_events=True,
    ) as profiler:
        for _ in range(warmup + steps):
            step()
            profiler.step()
    main = [event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CPU]
    marks = [event.thread for event in main if event.name.startswith("ProfilerStep")]
    events = [
        ProfiledEvent(
            event.name,
            event.time_range.start / 1e6,
            event.time_range.elapsed_us() / 1e6,
            event.self_cpu_time_total / 1e6,
            event.is_user_annotation,
        )
        for event in main
        if event.thread == marks[0]
    ]
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / steps
    new = sorted(set(Path(folder).glob("*.json")) - before) if folder is not None else []
    return StepProfile.of(
        events,
        steps,
        device_seconds=busy if torch.cuda.is_available() else None,
        trace=new[0] if new else None,
    )

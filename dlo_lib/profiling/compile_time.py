"""What compiling costs against what it gains: seconds of the first call, seconds of each step, and the step from which on it has paid.

    compile + n · compiled <= n · eager    ⇔    n >= compile / (eager - compiled)

The eager and the compiled step are timed in turns, so that a machine that slows down slows both; medians, in wall time. A GPU is waited
for. With a warm cache (Inductor's, in a folder) the same graphs cost less to get: ``compiled_in_new_process`` measures that as it happens,
in a process that has compiled nothing yet.

Cost: two steps more than asked for, and the compiling.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from dlo_lib.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.profiling.compile_watch import CompileReport, watch_compilation

COMPILERS = ("g++", "clang++", "c++")


class Backend(Enum):
    """Of ``torch.compile``; the value is its name there."""

    INDUCTOR = "inductor"
    """Generates code: C++ on a processor, Triton on a GPU."""
    AOT_EAGER = "aot_eager"
    """Makes the same graphs and runs torch's own operations one by one: nothing is fused."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend that this machine can run, and why."""

    backend: Backend
    why: str


@dataclass(frozen=True)
class CompileTimes:
    """In seconds: what the first compiled call took beyond a step, and the median step of each."""

    compile: float
    eager: float
    compiled: float

    @property
    def speedup(self) -> float:
        """Eager over compiled."""
        return self.eager / self.compiled

    @property
    def break_even(self) -> int | None:
        """The step from which on compiling has paid; None if it never does."""
        return break_even_steps(self.compile, self.eager, self.compiled)


def break_even_steps(compile: float, eager: float, compiled: float) -> int | None:
    """The fewest steps after which the compiled run, its compiling included, has taken no longer than the eager one; None if never.

    Args:
        compile, eager, compiled: seconds of compiling, of an eager and of a compiled step.

    Raises:
        UserError: one of them is negative.

    >>> break_even_steps(30.0, 0.5, 0.25)
    120
    """
    if min(compile, eager, compiled) < 0:
        raise UserError(f"times must not be negative: compile {compile}, eager {eager}, compiled {compiled}")
    if compile == 0 and compiled <= eager:
        return 0
    return None if compiled >= eager else math.ceil(compile / (eager - compiled))


def usable_backend(device: torch.device | str = "cpu") -> BackendChoice:
    """Inductor where it can generate code for ``device``: a processor needs a C++ compiler (``$CXX``, g++ or clang++), a GPU Triton."""
    if torch.device(device).type == "cpu":
        wanted = (os.environ["CXX"].split()[0],) if os.environ.get("CXX", "").strip() else COMPILERS
        found = next((path for name in wanted if (path := shutil.which(name))), None)
        if found:
            return BackendChoice(Backend.INDUCTOR, f"Inductor generates C++, compiled by {found}")
        cure = "apt-get install g++, or module load gcc on a cluster"
        why = f"no C++ compiler ({', '.join(wanted)}): nothing is fused, nothing gets faster. Cure: {cure}"
        return BackendChoice(Backend.AOT_EAGER, why)
    try:
        import triton  # noqa: F401
    except ImportError:
        return BackendChoice(Backend.AOT_EAGER, "no Triton: nothing is fused, nothing gets faster. Cure: pip install triton")
    return BackendChoice(Backend.INDUCTOR, "Inductor generates Triton kernels")


def compile_times(eager: Callable[[], object], compiled: Callable[[], object], steps: int = 10) -> CompileTimes:
    """Time a step and its compiled form, in turns. ``compiled`` must not have been called before: its first call compiles.

    Raises:
        UserError: fewer than one step.
    """
    if steps < 1:
        raise UserError(f"{steps} steps cannot be timed: use at least 1")
    eager()  # what torch sets up at its first call is not the step's
    first = _seconds(compiled)
    pairs = [(_seconds(eager), _seconds(compiled)) for _ in range(steps)]
    eager_step, compiled_step = (statistics.median(times) for times in zip(*pairs))
    return CompileTimes(max(0.0, first - compiled_step), eager_step, compiled_step)


def compiled_in_new_process(function: Callable[[], object], cache: str | Path) -> CompileReport:
    """What compiling costs a process that has compiled nothing yet, with ``cache`` as the folder of Inductor's caches.

    The first call with an empty folder is a cold start; the next finds the folder warm, as a job that is started again would.

    Args:
        function: compiles and runs what is to be measured; it goes to the process by value, as with ``run_ranks``.
    """
    return run_ranks(_watched, 1, function, str(Path(cache).resolve()))[0]


def _watched(function: Callable[[], object], cache: str) -> CompileReport:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    import torch._inductor.config as config

    config.compile_threads = 1  # no pool of processes that would outlive this one
    with watch_compilation() as watch:
        function()
    return watch.report


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin

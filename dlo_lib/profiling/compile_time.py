"""The cost and the gain of ``torch.compile``: seconds of the first call, seconds of each step, and the number
of steps after which the cost is compensated.

    compile + n · compiled <= n · eager    ⇔    n >= compile / (eager - compiled)

The eager and the compiled step are timed alternately, so that a slowdown of the machine affects both. The
results are medians of the wall time. On a GPU, each step is synchronised. With a warm cache of Inductor,
which is a folder, the compilation of the same graphs is faster. ``compiled_in_new_process`` measures the
compilation in a new process.

Cost: the requested steps, two more steps, and the compilation.
"""

from __future__ import annotations

import importlib
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

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.profiling.compile_watch import CompileReport, watch_compilation

COMPILERS = ("g++", "clang++", "c++")


class Backend(Enum):
    """A backend of ``torch.compile``; the value is its name."""

    INDUCTOR = "inductor"
    """Generates code: C++ on a CPU, Triton on a GPU."""
    AOT_EAGER = "aot_eager"
    """Creates the same graphs and runs the operations of torch separately, without fusion."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend that this machine can run, and the reason."""

    backend: Backend
    why: str


@dataclass(frozen=True)
class CompileTimes:
    """Times in seconds: the first compiled call without one step, and the median eager and compiled step."""

    compile: float
    eager: float
    compiled: float

    @property
    def speedup(self) -> float:
        """The eager time divided by the compiled time."""
        return self.eager / self.compiled

    @property
    def break_even(self) -> int | None:
        """The number of steps that compensate the compilation; None if no number does."""
        return break_even_steps(self.compile, self.eager, self.compiled)


def break_even_steps(compile: float, eager: float, compiled: float) -> int | None:
    """Return the smallest number of steps for which the compiled run, including the compilation, takes no
    longer than the eager run; None if there is none.

    Args:
        compile: seconds of the compilation.
        eager, compiled: seconds of an eager and of a compiled step.

    Raises:
        UserError: an argument is negative.

    >>> break_even_steps(30.0, 0.5, 0.25)
    120
    """
    if min(compile, eager, compiled) < 0:
        raise UserError(f"times must not be negative: compile {compile}, eager {eager}, compiled {compiled}")
    if compile == 0 and compiled <= eager:
        return 0
    return None if compiled >= eager else math.ceil(compile / (eager - compiled))


def usable_backend(device: torch.device | str = "cpu") -> BackendChoice:
    """Return Inductor if it can generate code for ``device``, otherwise aot_eager. A CPU needs a C++ compiler
    (``$CXX``, g++ or clang++), a GPU needs Triton."""
    if torch.device(device).type == "cpu":
        wanted = (os.environ["CXX"].split()[0],) if os.environ.get("CXX", "").strip() else COMPILERS
        found = next((path for name in wanted if (path := shutil.which(name))), None)
        if found:
            return BackendChoice(Backend.INDUCTOR, f"Inductor generates C++, compiled by {found}")
        cure = "apt-get install g++, or module load gcc on a cluster"
        why = f"no C++ compiler ({', '.join(wanted)}): operations are not fused and not faster. Cure: {cure}"
        return BackendChoice(Backend.AOT_EAGER, why)
    try:
        import triton  # noqa: F401
    except ImportError:
        why = "no Triton: operations are not fused and not faster. Cure: pip install triton"
        return BackendChoice(Backend.AOT_EAGER, why)
    return BackendChoice(Backend.INDUCTOR, "Inductor generates Triton kernels")


def compile_times(
    eager: Callable[[], object], compiled: Callable[[], object], steps: int = 10
) -> CompileTimes:
    """Time an eager and a compiled step alternately. ``compiled`` must not have been called before, because
    its first call compiles.

    Raises:
        UserError: ``steps`` is below 1.
    """
    if steps < 1:
        raise UserError(f"{steps} steps cannot be timed: use at least 1")
    eager()  # exclude the initialisation of torch in its first call
    first = _seconds(compiled)
    pairs = [(_seconds(eager), _seconds(compiled)) for _ in range(steps)]
    eager_step, compiled_step = (statistics.median(times) for times in zip(*pairs))
    return CompileTimes(max(0.0, first - compiled_step), eager_step, compiled_step)


def compiled_in_new_process(function: Callable[[], object], cache: str | Path) -> CompileReport:
    """Run ``function`` in a new process with ``cache`` as the folder of Inductor's caches, and report its
    compilation.

    The first call with an empty folder is a cold start. The next call finds a warm cache, as a restarted job
    does.

    Args:
        function: compiles and runs the code. It is sent to the process by value, as in ``run_ranks``.
        cache: the folder.
    """
    return run_ranks(_watched, 1, function, str(Path(cache).resolve()))[0]


def _watched(function: Callable[[], object], cache: str) -> CompileReport:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    importlib.import_module("torch._inductor.compile_fx")  # not measured: later ranks find it imported
    import torch._inductor.config as config

    config.compile_threads = 1  # start no pool of processes, because it could outlive this process
    with watch_compilation() as watch:
        function()
    return watch.report


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin

"""The table of a GPU: every fused operation against PyTorch's operators, ``torch.compile``, Liger-Kernel and
the backends of PyTorch's attention, forward and backward apart, at small and at large sizes.

    python -m benchmarks.card_table FOLDER [--dtype bf16] [--limit 100] [--smoke]

Each implementation is compared with PyTorch's operators (eager) before it is timed. FOLDER/rows.jsonl has a
line for each measurement, and a second run continues where the first stopped; FOLDER/table.md has the table.
The functions of ``torch.compile`` come last: 12 processes compile them first and fill the cache on the disk.

Exit status: 0, or 1 if an implementation is wrong, failed or was left out for lack of time.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.card_cases import Case, cases
from benchmarks.card_markdown import table
from benchmarks.card_timing import Meter
from dlo_lib import kernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGEST_ERROR = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-3}
"""The norm of the difference from eager, relative to the norm, of the output and of each gradient."""
COMPILERS = 12
"""Processes that compile at the same time."""
SECONDS_OF_A_COMPILATION = 40.0
"""What is left of the time limit at least where compiling begins."""

Row = dict[str, Any]
Action = Callable[..., Tensor]


class Table:
    """Measures rows until the time is over, and keeps each in a file.

    Args:
        folder: of the rows.
        dtype: a name of ``DTYPES``.
        device: of the tensors.
        end: when the last row begins at the latest, by ``time.monotonic``.
    """

    def __init__(self, folder: Path, dtype: str, device: torch.device, end: float) -> None:
        self.path, self.dtype, self.device, self.end = folder / "rows.jsonl", dtype, device, end
        self.meter = Meter(device)
        self.left_out: list[str] = []
        self.rows: list[Row] = []
        if self.path.exists():
            self.rows = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        machine = _machine(device)
        if any(row["machine"] != machine for row in self.rows):
            self.rows = []
        self.machine = machine
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def measure(self, case: Case, actions: dict[str, Action]) -> None:
        """Compare the implementations with eager and time those that have no row yet."""
        missing = [who for who in actions if (case.name, self.dtype, who) not in self.done()]
        if not missing:
            return
        if time.monotonic() > self.end:
            self.left_out += [f"{case.name}: {who}" for who in missing]
            return
        inputs = case.inputs(DTYPES[self.dtype], self.device)
        with torch.no_grad():
            grad = torch.randn_like(case.eager(*inputs))
        expected = results(case.eager, inputs, grad)
        for who in missing:
            self._add(case, who, self._measured(case, who, actions[who], inputs, grad, expected))

    def measure_adamw(self, smoke: bool) -> None:
        """Measure the steps of AdamW, of fp32 parameters: PyTorch's fused form is the reference."""
        count, made = _optimizers(smoke, self.device)
        name = f"adamw, {count / 1e6:.0f} M in fp32"
        # parameter, gradient and two moments are read; parameter and moments are written
        moved = 7 * torch.float32.itemsize * count // DTYPES[self.dtype].itemsize
        case = Case("adamw", f"{count / 1e6:.0f} M in fp32", _no_action, _no_action, (), (moved, 0))
        for optimizer in made.values():
            optimizer.step()
        expected = [param.detach().clone() for param in made["eager"].param_groups[0]["params"]]
        for who, optimizer in made.items():
            found = [param.detach() for param in optimizer.param_groups[0]["params"]]
            error = max(map(relative_error, found, expected))
            if (name, self.dtype, who) in self.done() or time.monotonic() > self.end:
                continue
            if not error <= 1e-6:
                self._add(case, who, {"problem": f"wrong: differs from eager by {error:.1e}", "error": error})
                continue
            timing = self.meter.time(optimizer.step, [], None)
            shares = self._shares(case, timing.forward_ms, timing.backward_ms)
            self._add(case, who, {"error": error, **asdict(timing), **shares})

    def done(self) -> set[tuple[str, str, str]]:
        """Return the name, the dtype and the implementation of each measured row."""
        return {(row["name"], row["dtype"], row["who"]) for row in self.rows if "problem" not in row}

    def _measured(
        self,
        case: Case,
        who: str,
        action: Action,
        inputs: list[Tensor],
        grad: Tensor,
        expected: list[Tensor],
    ) -> Row:
        try:
            found = results(action, inputs, grad)
            error = max(map(relative_error, found, expected))
            del found
            if not error <= LARGEST_ERROR[self.dtype]:
                return {"problem": f"wrong: differs from eager by {error:.1e}", "error": error}
            timing = self.meter.time(action, inputs, grad, copied=who in case.writes_input)
        except Exception as failure:  # noqa: BLE001 - a peer may fail in any way
            return {"problem": f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"}
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return {"error": error, **asdict(timing), **self._shares(case, timing.forward_ms, timing.backward_ms)}

    def _shares(self, case: Case, forward_ms: float, backward_ms: float) -> Row:
        """Return the share of the rate of a copy, or of a product, that each phase reaches."""
        if case.moved is not None:
            size = DTYPES[self.dtype].itemsize
            work, rate = [size * moved for moved in case.moved], self.meter.copied_per_second
        else:
            assert case.multiplied is not None
            work, rate = list(case.multiplied), self.meter.multiplied_per_second
        times = forward_ms / 1e3, backward_ms / 1e3
        shares = [done / seconds / rate if done else None for done, seconds in zip(work, times)]
        return {"limit": "copy" if case.moved else "product", "shares": shares}

    def _add(self, case: Case, who: str, row: Row) -> None:
        row = {
            "name": case.name, "operation": case.operation, "size": case.size, "dtype": self.dtype,
            "who": who, "machine": self.machine, **row,
        }  # fmt: skip
        key = (row["name"], row["dtype"], row["who"])
        self.rows = [old for old in self.rows if (old["name"], old["dtype"], old["who"]) != key] + [row]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        said = row.get("problem") or f"{row['forward_ms']:.3f} + {row['backward_ms']:.3f} ms, " + (
            f"CPU {row['cpu_us']:.0f} us"
        )
        print(f"{row['name']}: {who}: {said}", flush=True)


def results(action: Action, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return copies of the output and of the gradients, from copies of the inputs."""
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    out = action(*(x * 1 for x in copies))  # an implementation may write over its inputs
    kept = out.detach().clone()
    return [kept, *torch.autograd.grad(out, copies, grad)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of ``expected``; NaN if a value is NaN."""
    if found.shape != expected.shape:
        return float("inf")
    difference = torch.linalg.vector_norm(found.float() - expected.float())
    return (difference / torch.linalg.vector_norm(expected.float()).clamp_min(1e-30)).item()


def compiled(case: Case, backend: str = "inductor") -> Action:
    """Return eager as ``torch.compile`` compiles it for the shapes of the case."""
    torch._dynamo.reset()  # type: ignore[attr-defined]  # functions of several sizes share their code
    return torch.compile(case.eager, dynamic=False, backend=backend)


def measure_compiled(made: Table, every: list[Case], smoke: bool) -> None:
    """Measure the peer ``torch.compile`` of the cases that have it; of all in a smoke test, which makes the
    graphs and generates no code."""
    wanted = [case for case in every if case.compiled or smoke]
    waiting = [case for case in wanted if (case.name, made.dtype, "compile") not in made.done()]
    left = made.end - time.monotonic()
    if waiting and not smoke:
        if left <= SECONDS_OF_A_COMPILATION:
            made.left_out += [f"{case.name}: compile" for case in waiting]
            return
        compile_ahead([case.name for case in waiting], made.dtype, left - 15)
    for case in waiting:
        made.measure(case, {"compile": compiled(case, "aot_eager" if smoke else "inductor")})


def compile_ahead(names: list[str], dtype: str, seconds: float, device: str = "cuda", *sizes: int) -> None:
    """Compile the functions in several processes, which fill Inductor's cache on the disk.

    Args:
        names: of cases.
        seconds: after which the processes are stopped.
        sizes: the argument ``largest`` of ``cases``, if any.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(COMPILERS, len(names)), mp_context=context) as pool:
        running = [pool.submit(_compile_one, name, dtype, device, *sizes) for name in names]
        end = time.monotonic() + seconds
        for name, future in zip(names, running):
            try:
                future.result(max(1.0, end - time.monotonic()))
            except Exception as failure:  # noqa: BLE001 - or a compiler
                print(f"{name}: torch.compile: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
        for process in list(pool._processes.values()):
            process.kill()


def _compile_one(name: str, dtype: str, device: str, *sizes: int) -> None:
    every = cases(DTYPES[dtype], torch.device(device), *sizes)
    (case,) = [case for case in every if case.name == name]
    inputs = case.inputs(DTYPES[dtype], torch.device(device))
    out = compiled(case)(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _optimizers(smoke: bool, device: torch.device) -> tuple[int, dict[str, torch.optim.Optimizer]]:
    """Return the number of parameters, and AdamW by name over equal fp32 parameters: ours, and PyTorch's."""
    shapes = [(8, 8), (8,)] if smoke else [(8192, 3072), (3072,)] * 4
    forms: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "ours": kernels.FusedAdamW,
        "eager": functools.partial(torch.optim.AdamW, fused=True),
        "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    }
    made = {}
    for name, form in forms.items():
        generator = torch.Generator(device).manual_seed(0)
        params = [torch.randn(shape, device=device, generator=generator) for shape in shapes]
        for param in params:
            param.grad = torch.randn(param.shape, device=device, generator=generator)
        made[name] = form([param.requires_grad_() for param in params], lr=1e-3)
    return sum(math.prod(shape) for shape in shapes), made


def _machine(device: torch.device) -> str:
    if device.type != "cuda":
        return "a CPU, which gives no figures"
    return f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}"


def measure(folder: Path, dtype: str, limit: float, smoke: bool) -> int:
    """Measure the table; print and write it; return the exit status."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if smoke else "cuda")
    made = Table(folder, dtype, device, began + limit - 5)
    every = cases(DTYPES[dtype], device, *((16,) if smoke else ()))
    for case in every:
        made.measure(case, {"ours": case.ours, "eager": case.eager, **case.peers})
    made.measure_adamw(smoke)
    measure_compiled(made, every, smoke)
    text = table(made.rows, dtype, made.meter.copied_per_second, made.meter.multiplied_per_second)
    (folder / "table.md").write_text(text, encoding="utf-8")
    problems = [row for row in made.rows if "problem" in row]
    print(text)
    for line in made.left_out:
        print(f"left out after {limit:.0f} s: {line}")
    print(
        f"{len(made.rows)} rows in {time.monotonic() - began:.0f} s, {len(problems)} with a problem, "
        f"{len(made.left_out)} left out"
    )
    return int(bool(problems or made.left_out))


def _no_action(*inputs: Tensor) -> Tensor:
    raise AssertionError("a step of an optimizer has no inputs")


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the fused operations on a GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--limit", type=float, default=100.0, metavar="SECONDS")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, to test this program")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        print("card_table: PyTorch sees no GPU here: --smoke tests this program", file=sys.stderr)
        return 2
    # Read when Inductor starts: each of the processes that compile at the same time has one thread.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(arguments.folder.resolve() / "cache"))
    if not arguments.smoke and importlib.util.find_spec("liger_kernel") is None:
        print("Liger-Kernel is not installed, so its rows are missing")
    return measure(arguments.folder, arguments.dtype, arguments.limit, arguments.smoke)


if __name__ == "__main__":
    sys.exit(main())

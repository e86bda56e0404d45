"""The record of compiled kernels: what the compiler allocates for each code that ``tuning.toml`` gives.

A kernel is compiled again for other types, constants and options, and not for other sizes: a size changes the
code only where it changes the tiles, divides into them, or is a constant of the kernel. ``variants`` runs
every case on the meta device, and yields each different code once for each architecture. To compile all of
them takes half an hour, so that a file holds the results. ``update`` compiles what the file does not have;
``differences`` compares with it and compiles nothing.

A code is named by a hash of what the compiler receives: Triton's IR without line numbers, and the options.
The file has only kernels without a problem (``report.CompiledKernel.problem``).
"""

from __future__ import annotations

import csv
import hashlib
import io
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlo_lib.base.files import write_text
from dlo_lib.kernels.cases import CASES, EDGES, SIZES, Size
from dlo_lib.kernels.dispatch import KernelBackend, using
from dlo_lib.kernels.report import CAPABILITIES, code_of, compiled, launches_of, source_of

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_SHOWN = 5


class RecordedCode(NamedTuple):
    """A line of the file: a code on one architecture, and what the compiler allocates.

    Attributes:
        code: its name.
        sm: a compute capability.
        kernel, dtype: of one operation that has it. Others may have it too.
        tiles: the constants and options.
        registers: of a thread.
        shared: bytes of shared memory of a program.
        instructions: of ``CompiledKernel.instructions``.
    """

    code: str
    sm: str
    kernel: str
    dtype: str
    tiles: str
    registers: str
    shared: str
    instructions: str


_Part = tuple[set[tuple[str, str]], list[RecordedCode], list[str]]
"""The codes of a dtype on one architecture, and the rows and the problems of those that were compiled."""


@dataclass(frozen=True)
class CodeVariant:
    """A launch whose code differs from that of the others of its architecture."""

    code: str
    capability: int
    operation: str
    dtype: str
    size: Size
    launch: Any

    @property
    def key(self) -> tuple[str, str]:
        """The first two columns of its row."""
        return self.code, str(self.capability)

    def __str__(self) -> str:
        kernel = self.launch.kernel.__name__.strip("_")
        return f"{self.operation}: {kernel} in {self.dtype} on sm_{self.capability}, {_tiles(self.launch)}"


def _tiles(launch: Any) -> str:
    """Return the constants and options of a launch."""
    constants = {param.name for param in launch.kernel.params if param.is_constexpr}
    values = {name: value for name, value in launch.arguments.items() if name in constants}
    return " ".join(f"{name}={value}" for name, value in (values | launch.options).items())


_EDGES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("",),
    "fp16": (),
    "fp32": ("flash_attention", "rms_norm", "layer_norm"),
}
"""How the names of the edges of a dtype begin: of those whose rules depend on it. In fp16 the rules are those
of bf16."""


def _cases(dtypes: Sequence[str]) -> Iterator[tuple[str, str, Size]]:
    """Yield the operations, dtypes and sizes."""
    for dtype in dtypes:
        yield from ((name, dtype, size) for name in CASES for size in SIZES.values())
        yield from ((name, dtype, SIZES["3b"]) for name in EDGES if name.startswith(_EDGES[dtype]))


def variants(capability: int, dtypes: Sequence[str] = tuple(DTYPES)) -> Iterator[CodeVariant]:
    """Yield each different code of the cases and edges for one architecture, in the given dtypes."""
    seen: set[str] = set()
    names: set[str] = set()
    with using(KernelBackend.TRITON):
        for operation, dtype, size in _cases(dtypes):
            for launch in launches_of(operation, DTYPES[dtype], capability, size):
                options = sorted(launch.options.items())
                signature = (
                    f"{launch.kernel.__module__}.{launch.kernel.__name__} {source_of(launch)} {options}"
                )
                if signature in seen:
                    continue
                seen.add(signature)
                code = _name_of(signature, f"{options}\n", launch, capability)
                if code not in names:
                    names.add(code)
                    yield CodeVariant(code, capability, operation, dtype, size, launch)


_NAMES: dict[str, str] = {}
"""The name of the code of a signature, which all architectures share."""


def _name_of(signature: str, options: str, launch: Any, capability: int) -> str:
    if signature not in _NAMES:
        code = options + code_of(launch, capability)
        _NAMES[signature] = hashlib.sha256(code.encode()).hexdigest()[:12]
    return _NAMES[signature]


def read(path: Path) -> tuple[str, dict[tuple[str, str], RecordedCode]]:
    """Return the version of Triton that compiled the kernels of a file, and its rows by code and capability.

    Returns:
        An empty name and no rows if there is no such file.
    """
    if not path.exists():
        return "", {}
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    rows = [RecordedCode(**row) for row in csv.DictReader(io.StringIO(rest))]
    return first.removeprefix("Triton "), {(row.code, row.sm): row for row in rows}


def _write(path: Path, rows: Mapping[tuple[str, str], RecordedCode]) -> None:
    import triton

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(RecordedCode._fields)
    ordered = sorted(rows.values(), key=_order)
    writer.writerows(ordered)
    write_text(path, f"Triton {triton.__version__}\n{text.getvalue()}")


def _order(row: RecordedCode) -> tuple[Any, ...]:
    return row.kernel, row.dtype, int(row.sm), row.tiles, row.code


def update(path: Path, jobs: int = 1) -> Iterator[str]:
    """Compile what the file does not have with the installed Triton, write it, and remove what no case has.

    Yields:
        The problem of each kernel that has one.
    """
    import triton

    version, rows = read(path)
    if version != triton.__version__:
        rows = {}
    current: set[tuple[str, str]] = set()
    for keys, made, problems in _parts(rows, jobs):
        current |= keys
        rows = {(row.code, row.sm): row for row in made} | rows
        _write(path, rows)
        yield from problems
    _write(path, {key: row for key, row in rows.items() if key in current})


def _parts(known: Mapping[tuple[str, str], RecordedCode], jobs: int) -> Iterator[_Part]:
    """Compile in ``jobs`` processes; a part is a dtype on one architecture."""
    parts = [(capability, dtype, set(known)) for dtype in DTYPES for capability in CAPABILITIES]
    if jobs == 1:
        yield from (_missing(*part) for part in parts)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for result in [pool.submit(_missing, *part) for part in parts]:
            yield result.result()


def _missing(capability: int, dtype: str, known: set[tuple[str, str]]) -> _Part:
    """Return the codes of an architecture, and the rows and the problems of those that are not known."""
    torch.set_num_threads(1)
    keys, rows, problems = set(), [], []
    for variant in variants(capability, (dtype,)):
        keys.add(variant.key)
        if variant.key in known:
            continue
        made = compiled(variant.operation, variant.launch, capability, DTYPES[dtype], variant.size)
        if made.problem:
            problems.append(f"{dtype}, {_tiles(variant.launch)}: {made.problem}")
            continue
        rows.append(
            RecordedCode(
                *variant.key,
                kernel=f"{variant.operation.partition(',')[0]}.{made.kernel}",
                dtype=dtype,
                tiles=_tiles(variant.launch),
                registers=str(made.registers),
                shared=str(made.shared_bytes),
                instructions="; ".join(made.instructions),
            )
        )
    return keys, rows, problems


def differences(path: Path) -> list[str]:
    """Return one line for each difference between the file and the kernels, and for each rule of
    ``tuning.toml`` that no case uses. Nothing is compiled."""
    from dlo_lib.kernels.triton_code.tuning import rules_of, used_rules

    _, rows = read(path)
    missing, unused, current = [], [], set()
    for capability in CAPABILITIES:
        with used_rules() as used:
            for variant in variants(capability):
                current.add(variant.key)
                if variant.key not in rows:
                    missing.append(f"not compiled: {variant}")
        unused += [
            f"no case on sm_{capability} uses rule {place} of {kernel}, {table}, in tuning.toml"
            for kernel, table, place in sorted(rules_of(capability) - used)
        ]
    stale = [f"no case has this code any more: {' '.join(rows[key])}" for key in sorted(set(rows) - current)]
    found = unused
    for lines in (missing, stale):
        found += lines[:_SHOWN]
        if len(lines) > _SHOWN:
            found.append(f"and {len(lines) - _SHOWN} more")
    return found

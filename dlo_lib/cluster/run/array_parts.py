"""An array that is larger than SLURM allows (``MaxArraySize``, 1,001 by default) is submitted in parts.

    element = index in SLURM's array + first element of the part

Each part is a submission of the job, with indices from 0. Its script reads the first element from a file
beside the submission's name. SLURM names output by index, so the output of a part is in a separate folder,
and ``logs/<element>.out`` is a link to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlo_lib.cluster.site.quoting import output_pattern
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.states import ElementStatus

_DEFAULT = 1001
_LIMIT = re.compile(r"^#SBATCH --array=\S+?%(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class ArrayPart:
    """Some elements of a job, and the element of SLURM's index 0."""

    first: int
    elements: tuple[int, ...]

    @property
    def indices(self) -> str:
        """The indices of its elements in SLURM's form.

        >>> ArrayPart(1001, (1001, 1002, 1003, 1010)).indices
        '0-2,9'
        """
        runs: list[list[int]] = []
        for element in self.elements:
            index = element - self.first
            if runs and runs[-1][1] == index - 1:
                runs[-1][1] = index
            else:
                runs.append([index, index])
        return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)


def parts_of(elements: Iterable[int], most: int) -> list[ArrayPart]:
    """Return the elements in parts whose indices are below ``most``.

    >>> [(part.first, part.elements) for part in parts_of([0, 1, 2, 4, 5], most=2)]
    [(0, (0, 1)), (2, (2,)), (4, (4, 5))]
    """
    found: dict[int, list[int]] = {}
    for element in sorted(elements):
        found.setdefault(element // most * most, []).append(element)
    return [ArrayPart(first, tuple(some)) for first, some in found.items()]


def most_elements() -> int:
    """Return the largest number of elements of an array on this cluster; indices are smaller.

    Raises:
        NoAnswer: the controller does not answer.
    """
    text = commands.config("MaxArraySize")
    return int(text) if text.isdigit() and int(text) else _DEFAULT


def limit_of(script: str) -> int | None:
    """Return how many elements a job script lets run at the same time; None: all."""
    found = _LIMIT.search(script)
    return int(found[1]) if found else None


def shares(limit: int, parts: Sequence[ArrayPart]) -> list[int]:
    """Return how many elements of each part may run at the same time: at least 1, and no more than it has.

    >>> shares(3, parts_of(range(12), most=11)), shares(1, parts_of(range(3), most=1))
    ([2, 1], [1, 1, 1])
    """
    found = [1] * len(parts)
    for _ in range(limit - len(parts)):
        open_parts = [at for at, part in enumerate(parts) if found[at] < len(part.elements)]
        if open_parts:
            found[min(open_parts, key=lambda at: found[at] / len(parts[at].elements))] += 1
    return found


def words(folder: Path, part: ArrayPart, share: int | None) -> list[str]:
    """Return the options of sbatch for a part, after its folder and its links of output are made.

    Args:
        folder: of the job.
        part: the part to submit.
        share: how many of its elements may run at the same time; None: all.
    """
    options = [f"--array={part.indices}" + ("" if share is None else f"%{share}")]
    if part.first == 0:
        return options
    logs = folder / "logs"
    name = f"part-{part.first}"
    (logs / name).mkdir(parents=True, exist_ok=True)
    for element in part.elements:
        _link(logs / f"{element}.out", Path(name) / f"{element - part.first}.out")
    return [*options, f"--output={output_pattern(logs / name, '%a.out')}"]


def _link(link: Path, target: Path) -> None:
    """Make ``link`` lead to ``target``, a path from its folder, where an earlier output is kept."""
    if link.is_symlink():
        if Path(os.readlink(link)) == target:
            return
        link.unlink()
    elif link.exists():
        os.replace(link, link.parent / target)
    link.symlink_to(target)


def by_element(first: int, statuses: Mapping[int, ElementStatus]) -> dict[int, ElementStatus]:
    """Return the statuses of SLURM's indices by element."""
    return {first + index: replace(status, element=first + index) for index, status in statuses.items()}


def planned(script: str, elements: Sequence[object], most: int) -> str:
    """Return a script whose array is not larger than its first part, for an estimate of its start."""
    if len(elements) <= most:
        return script
    return re.sub(r"^(#SBATCH --array=)0-\d+", rf"\g<1>0-{most - 1}", script, flags=re.MULTILINE)

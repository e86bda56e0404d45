"""Start the zygote of a lab, without waiting and without torch.

The lab's source determines what the zygote blocks, imports and places in workers' folders.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from dlo_lib.grading.lab.declared import CHECKS_FOLDER
from dlo_lib.grading.lab.release import imported_files
from dlo_lib.grading.lab.source import CellKind, LabSource
from dlo_lib.grading.lab.syntax import imported_modules, parsed
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.isolation import Isolation

LOADS_DYNAMO = re.compile(
    r"\b(optim|compile|checkpoint|DistributedDataParallel|fully_shard|dlo_lib\.(hpo|train))\b"
)


def zygote_for(lab: LabSource, isolation: Isolation | None = None) -> Zygote:
    """Start the zygote of ``lab``: it blocks what the lab teaches and has imported what the given cells
    and the scenarios import.

    ``isolation``: isolates the workers; by default the best isolation of this host, or none. A command that
    grades calls ``isolation.required_isolation()`` first.
    """
    given = [cell.source for cell in lab.cells if cell.kind is CellKind.GIVEN]
    # Not the references: the code of a student could run them.
    files = {name: lab.given / name for name in imported_files(lab.info, lab.given)}
    warm = imported_modules([*given, *_scenarios(lab.given)])
    return Zygote(lab.info.taught, warm, lab.info.reduced, files, isolation, _loads_dynamo(lab))


def _scenarios(folder: Path) -> Iterator[str]:
    """Yield the functions that run on ranks, as text: each rank would import again what they import."""
    for path in sorted((folder / CHECKS_FOLDER).glob("*.py")):
        for node in parsed(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(decorator, ast.Name) and decorator.id == "scenario"
                for decorator in node.decorator_list
            ):
                yield ast.unparse(node)


def _loads_dynamo(lab: LabSource) -> bool:
    """Whether the lab's text or its checks name something that makes torch load its
    compiler, as optimizers do."""
    texts = [cell.source for cell in lab.cells]
    files = [path for folder in lab.folders for path in sorted(folder.rglob("*.py"))]
    texts += [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return any(LOADS_DYNAMO.search(text) for text in texts)

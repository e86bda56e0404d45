"""Every lab below solutions/, found by itself: the reference earns everything, the untouched notebook nothing, a mutant loses what it says.

A new lab needs no new test. A mutant that no longer loses its points, or loses others, says that a check has gone soft or hard. These are
the rules of `dlo release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlo_lib.grading.course import LabInfo, source_labs
from dlo_lib.grading.host import Zygote
from dlo_lib.grading.judge import zygote_for
from dlo_lib.grading.mutants import mutants_of
from dlo_lib.grading.proof import ON_PAPER, Rule, mutant_faults, reference_faults, untouched_faults
from dlo_lib.grading.source import read_lab, source_folder

LABS = source_labs()
SOURCES = {lab.directory: read_lab(source_folder(lab)) for lab in LABS}
MUTANTS = [(lab, file) for lab in LABS for file in mutants_of(SOURCES[lab.directory])]

every_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.directory)


@pytest.fixture(scope="module")
def zygote_of() -> Iterator[Callable[[LabInfo], Zygote]]:
    """One zygote a lab, shared by its tests."""
    started: dict[str, Zygote] = {}

    def get(lab: LabInfo) -> Zygote:
        if lab.directory not in started:
            started[lab.directory] = zygote_for(SOURCES[lab.directory])
        return started[lab.directory]

    yield get
    for zygote in started.values():
        zygote.close()


@every_lab
def test_the_reference_scores_full_marks(lab: LabInfo, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    assert reference_faults(SOURCES[lab.directory], zygote_of(lab)) == []


@every_lab
def test_the_untouched_notebook_scores_nothing(lab: LabInfo, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    assert untouched_faults(SOURCES[lab.directory], zygote_of(lab)) == []


@pytest.mark.parametrize(("lab", "file"), MUTANTS, ids=[f"{lab.directory}-{file.stem}" for lab, file in MUTANTS])
def test_each_mutant_loses_exactly_its_points(lab: LabInfo, file: Path, zygote_of: Callable[[LabInfo], Zygote]) -> None:
    assert mutant_faults(SOURCES[lab.directory], file, zygote_of(lab)) == []


@every_lab
@pytest.mark.parametrize("rule", ON_PAPER.values(), ids=lambda rule: rule.__name__)
def test_every_rule_holds_on_paper(lab: LabInfo, rule: Rule) -> None:
    assert rule(SOURCES[lab.directory]) == []

"""The copies that ``dlo similar`` finds in planted classes of 100, compared with those that copydetect finds.

A class has 70 honest students and 30 copies (:mod:`benchmarks.planted_class`). A row is one lab; the note has
the copies that were found and the other pairs that were listed, for each seed, and the pairs that were listed
in another class of 30 honest students. The method was tuned on labs
10 and 13, seeds 0 and 1. copydetect (``pip install copydetect``; without it, only ours runs) reads the code
cells as one file, with the released notebook as boilerplate. Its figure is the best that any threshold gives:
the copies above the second pair that is no copy, which an instructor cannot know.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.paired import Row, Spread
from benchmarks.planted_class import PlantedClass, planted_class
from dlo_lib.grading.classroom.similar.matching import compare
from dlo_lib.grading.classroom.similar.similarity import document, given_code, source_texts, submitted_cells
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.source import CellKind, LabSource, read_lab, source_folder

LABS = ("10", "13", "17")
SEEDS = 5
HONEST_SEED = 1000
ROWS = len(LABS)


def rows(pairs: int = SEEDS) -> Iterator[Row]:
    """``pairs`` is the number of classes of each lab."""
    for number in LABS:
        lab = read_lab(source_folder(find_lab(number, source_labs())))
        found, false, honest, peer, ratios = [], [], [], [], []
        for seed in range(pairs):
            planted = planted_class(lab, seed)
            began = time.perf_counter()
            listed = _ours(planted)
            ours = time.perf_counter() - began
            copies = {copy.pair for copy in planted.copies}
            found.append(len(listed & copies))
            false.append(len(listed - copies))
            honest.append(len(_ours(planted_class(lab, HONEST_SEED + seed, honest=30, each=0))))
            if importlib.util.find_spec("copydetect"):
                began = time.perf_counter()
                peer.append(_best(_copydetect(planted), copies))
                ratios.append(ours / (time.perf_counter() - began))
        note = f"found of 30: {_listed(found)}; false pairs: {_listed(false)}; "
        note += f"false pairs of 30 honest students: {_listed(honest)}"
        note += f"; copydetect, best threshold: {_listed(peer)}" if peer else "; copydetect is not installed"
        spread = Spread(statistics.median(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None
        yield Row(lab.info.directory, "copydetect", 1, spread, note=note)


def _ours(planted: PlantedClass) -> set[tuple[str, str]]:
    given = given_code(planted.lab)
    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as folder:
        files = planted.write(Path(folder))
        class_ = {name: document(submitted_cells(planted.lab, file), given) for name, file in files.items()}
    sources = {name: document(parts, given) for name, parts in source_texts(planted.lab).items()}
    return {(match.one, match.other) for match in compare(class_, sources) if match.other in class_}


def _copydetect(planted: PlantedClass) -> dict[tuple[str, str], float]:
    """Return the similarity of each pair, by copydetect with its default settings."""
    from copydetect import CopyDetector

    with tempfile.TemporaryDirectory(prefix="dlo-benchmark-") as name:
        class_, released = Path(name) / "class", Path(name) / "released"
        class_.mkdir()
        released.mkdir()
        (released / "released.py").write_text(_released(planted.lab), encoding="utf-8")
        for student, answers in planted.answers.items():
            (class_ / f"{student}.py").write_text("\n\n".join(answers.values()), encoding="utf-8")
        detector = CopyDetector(
            test_dirs=[str(class_)],
            boilerplate_dirs=[str(released)],
            extensions=["py"],
            silent=True,
            autoopen=False,
        )
        detector.run()
        tested, against = (
            [Path(file).stem for file in files] for files in (detector.test_files, detector.ref_files)
        )
        return {
            (one, other): max(detector.similarity_matrix[place, column])
            for place, one in enumerate(tested)
            for column, other in enumerate(against)
            if one < other
        }


def _best(similarity: dict[tuple[str, str], float], copies: set[tuple[str, str]]) -> int:
    found = false = 0
    for pair in sorted(similarity, key=lambda pair: -similarity[pair]):
        false += pair not in copies
        if false > 1:
            break
        found += pair in copies
    return found


def _released(lab: LabSource) -> str:
    return "\n".join(cell.released for cell in lab.cells if cell.kind is not CellKind.TEXT)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

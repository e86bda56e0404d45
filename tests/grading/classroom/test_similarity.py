"""Similar submissions are found after renaming and moving; released code and common code do not count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.classroom.fingerprints import K, W, fingerprints, hashes, tokens
from dlo_lib.grading.classroom.nbgrader_course import open_course
from dlo_lib.grading.classroom.similarity import (
    Match,
    compare,
    find_similar,
    released_hashes,
    source_documents,
    submission_document,
)
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import LabSource, notebook_text

ORIGINAL = '''
def quantise(x):
    """int8 values and the scale of each row."""
    scale = absmax_scale(x)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = []
    for row, divisor in zip(x, safe):
        rounded = torch.round(row / divisor)
        values.append(rounded.clamp(-127, 127).to(torch.int8))
    result = torch.stack(values)
    if result.shape != x.shape:
        raise ValueError(f"{result.shape} is not {x.shape}")
    return result, scale
'''
DISGUISED = """
# my very own work
def quantise( tensor ):
    s = absmax_scale(tensor)   # the scale
    t = torch.where( s == 0, torch.ones_like( s ), s )
    out = [ ]
    for a, b in zip(tensor, t):
        c = torch.round(a / b)
        out.append(c.clamp(-127, 127).to(torch.int8))
    res = torch.stack(out)
    if res.shape != tensor.shape:
        raise ValueError('shapes')
    return res, s
"""
ANOTHER = """
def quantise(x):
    scale = absmax_scale(x)
    divisor = scale.clone()
    divisor[divisor == 0] = 1
    return (x / divisor.unsqueeze(1)).round().type(torch.int8), scale
"""


def handed_in(lab: LabSource, folder: Path, answer: str, extra: str = "") -> Path:
    notebook: dict[str, Any] = json.loads(notebook_text(release_notebook(lab.folder)))
    for cell in notebook["cells"]:
        if cell["id"] == "quantise":
            cell["source"] = answer
    notebook["cells"].append(
        {
            "cell_type": "code",
            "id": "own",
            "metadata": {},
            "source": extra,
            "outputs": [],
            "execution_count": None,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    return folder / "small.ipynb"


def pairs(matches: list[Match]) -> set[tuple[str, str]]:
    return {(match.one, match.other) for match in matches}


def test_names_layout_comments_and_literals_do_not_count() -> None:
    assert fingerprints(ORIGINAL) == fingerprints(DISGUISED)
    assert list(tokens("x = [y.size for y in 'a']  # why")) == list(
        tokens("abc=[ d . size for d in '''b''' ]")
    )
    assert list(tokens("a.size")) != list(tokens("a.shape"))


def test_text_that_is_not_python_has_tokens_too() -> None:
    assert list(tokens("def f(: 'open\n\\ ∑ %%bash")) != []


def test_a_common_passage_is_found_in_any_place_and_a_short_one_is_not() -> None:
    passage = " + ".join(f"a.f{number}" for number in range(20))  # 4 tokens a term
    for before in range(12):
        one, other = f"{'p() ;' * before} z = {passage}", f"w = {passage} if q else r[{before}]"
        assert fingerprints(one) & fingerprints(other)
    assert W + K - 1 < 4 * 20
    short = ";".join("a.b(c)" for _ in range(2))
    assert len(list(tokens(short))) < K
    assert hashes(short) == []


def test_released_code_is_removed(small: LabSource, tmp_path: Path) -> None:
    untouched = json.loads(notebook_text(release_notebook(small.folder)))
    (tmp_path / "small.ipynb").write_text(json.dumps(untouched))
    assert submission_document(small, tmp_path / "small.ipynb") == {}
    given = next(cell.released for cell in small.cells if cell.id == "setup")
    assert fingerprints(given)
    assert not fingerprints(given, released_hashes(small))
    (tmp_path / "small.ipynb").write_text("{")
    assert submission_document(small, tmp_path / "small.ipynb") == {}


def test_a_disguised_copy_is_listed_and_an_independent_solution_is_not(
    small: LabSource,
    tmp_path: Path,
) -> None:
    answers = {"ada": ORIGINAL, "blaise": DISGUISED, "chloe": ANOTHER}
    class_ = {
        name: submission_document(small, handed_in(small, tmp_path / name, answer))
        for name, answer in answers.items()
    }
    (match,) = compare(class_, {})
    assert (match.one, match.other, match.cells_of_one) == ("ada", "blaise", ("quantise",))
    assert match.share_of_one == match.share_of_other == 1.0


def test_a_copy_in_another_cell_is_found(small: LabSource, tmp_path: Path) -> None:
    one = submission_document(small, handed_in(small, tmp_path / "a", ORIGINAL))
    other = submission_document(
        small, handed_in(small, tmp_path / "b", "def quantise(x):\n    return helper(x)", DISGUISED)
    )
    (match,) = compare({"a": one, "b": other}, {})
    assert match.cells_of_other != match.cells_of_one


def test_the_library_is_among_the_sources(course: Path, small: LabSource, tmp_path: Path) -> None:
    import dlo_lib.parallel.zero.optimizer as pasted

    text = Path(pasted.__file__).read_text(encoding="utf-8")
    class_ = {
        "ada": submission_document(
            small, handed_in(small, tmp_path, "pass", text[len(text) // 3 : 2 * len(text) // 3])
        )
    }
    matches = compare(class_, source_documents(small))
    assert matches[0].other == "dlo_lib/parallel/zero/optimizer.py"
    assert matches[0].share_of_one > 0.8


def test_code_shared_by_much_of_a_class_does_not_count(small: LabSource, tmp_path: Path) -> None:
    document = submission_document(small, handed_in(small, tmp_path, ORIGINAL))
    assert len(compare({f"s{number}": document for number in range(6)}, {})) == 15
    assert compare({f"s{number}": document for number in range(30)}, {}) == []


def test_a_class_of_many_different_solutions_has_no_match() -> None:
    class_ = {
        f"s{number}": {"cell": frozenset(range(1000 * number, 1000 * number + 50))} for number in range(300)
    }
    assert compare(class_, {}) == []


def test_the_list_of_a_course_is_written_and_the_same_each_time(course: Path, small: LabSource) -> None:
    for student, answer in {"ada": ORIGINAL, "blaise": DISGUISED, "chloe": ANOTHER}.items():
        handed_in(small, course / "submitted" / student / "91_small", answer)
    (course / "submitted" / "dan" / "91_small").mkdir(parents=True)
    opened, lab = open_course(course), find_lab("91", source_labs())
    assert ("ada", "blaise") in pairs(find_similar(opened, lab))
    file = course / "grades" / "91_small" / "similar.csv"
    before = file.read_bytes()
    find_similar(opened, lab)
    assert file.read_bytes() == before
    assert before.startswith(b"one,other,shared,")


@pytest.mark.parametrize("text", ["'" * 50_001, '"""' * 20_001, "\\" * 50_000, "f('" * 20_000, "0" * 100_000])
def test_no_text_takes_long(text: str) -> None:
    assert len(list(tokens(text))) <= len(text)

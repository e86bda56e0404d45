"""Notebooks with edited test cells, points, metadata or order: the source's are used, and the answers
kept.
"""

from __future__ import annotations

import copy
from pathlib import Path

from hostile.case import PLAIN, REST, Family, Notebook, cell, own_cell

FRAMES = Family()
case = FRAMES.case
WARN = "GRADED_WARN"
WRONG = "def absmax_scale(x):\n    return x.float().abs().amax(dim=1) / 126"


def grading(notebook: Notebook, identity: str) -> dict[str, object]:
    return cell(notebook, identity)["metadata"]["nbgrader"]


# -- test cells


@case(WARN, REST, "test cell `test_scale` was changed or copied", row="13")
def a_test_cell_that_gives_the_points_itself(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = WRONG
    cell(notebook, "test_scale")["source"] = "3.0"


@case(WARN, REST, "test cell `test_scale` was changed or copied", row="13")
def a_test_cell_worth_a_thousand_points(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = WRONG
    grading(notebook, "test_scale")["points"] = 1000


@case(WARN, PLAIN, "TAMPER(test cell `test_scale`", row="14")
def a_test_cell_that_is_not_graded(notebook: Notebook, folder: Path) -> None:
    grading(notebook, "test_scale")["grade"] = False


@case(WARN, PLAIN, "test cell `test_scale` was missing", row="15")
def a_test_cell_deleted(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].remove(cell(notebook, "test_scale"))


@case(WARN, PLAIN, "was changed or copied", row="16")
def a_test_cell_copied(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(copy.deepcopy(cell(notebook, "test_scale")))


@case(WARN, PLAIN, "was changed or copied", row="16")
def a_test_cell_copied_with_an_id_of_its_own(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append({**copy.deepcopy(cell(notebook, "test_scale")), "id": "abcd1234"})


@case(WARN, PLAIN, "was changed or copied")
def every_cell_forty_times(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] = [copy.deepcopy(one) for one in notebook["cells"] for _ in range(40)]


@case(WARN, REST, "was missing")
def all_test_cells_deleted_and_wrong(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = WRONG
    notebook["cells"] = [one for one in notebook["cells"] if not one["id"].startswith("test_")]


@case(WARN, REST, "was changed or copied", row="20")
def partial_scores_beyond_all_bounds(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = WRONG
    test = cell(notebook, "test_scale")
    test["source"] = "float('nan')"
    score = {
        "output_type": "execute_result",
        "execution_count": 1,
        "metadata": {},
        "data": {"text/plain": "nan"},
    }
    test["outputs"] = [
        score,
        {**score, "data": {"text/plain": "-3.0"}},
        {**score, "data": {"text/plain": "1e308"}},
    ]


@case("GRADED", REST, "absmax_scale(x) is off")
def outputs_of_somebody_who_passed(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = WRONG
    passed = {
        "output_type": "execute_result",
        "execution_count": 1,
        "metadata": {},
        "data": {"text/plain": "3.0"},
    }
    cell(notebook, "test_scale")["outputs"] = [passed]


@case("GRADED", REST)
def a_report_of_ones_own_in_the_metadata(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = WRONG
    notebook["metadata"]["dlo"] |= {
        "status": "GRADED",
        "report": {"questions": {"scale": {"points": 3.0}}},
        "points": 99,
    }


# -- metadata


@case("GRADED", PLAIN, row="17")
def empty_nbgrader_metadata(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "why")["metadata"]["nbgrader"] = {}
    cell(notebook, "scale")["metadata"]["nbgrader"] = {}


@case("GRADED", PLAIN, row="17")
def metadata_of_schema_1(notebook: Notebook, folder: Path) -> None:
    for one in notebook["cells"]:
        if "nbgrader" in one["metadata"]:
            one["metadata"]["nbgrader"]["schema_version"] = 1


@case("GRADED", PLAIN, row="17")
def metadata_of_schema_99(notebook: Notebook, folder: Path) -> None:
    for one in notebook["cells"]:
        if "nbgrader" in one["metadata"]:
            one["metadata"]["nbgrader"]["schema_version"] = 99


@case(WARN, PLAIN)
def metadata_of_every_wrong_type(notebook: Notebook, folder: Path) -> None:
    for one, odd in zip(
        notebook["cells"],
        [None, 1, "x", [], {"nbgrader": None}, {"nbgrader": [1]}, {"nbgrader": {"grade_id": {}}}] * 9,
    ):
        one["metadata"] = odd


@case(WARN, PLAIN)
def all_metadata_and_ids_removed(notebook: Notebook, folder: Path) -> None:
    for one in notebook["cells"]:
        one["metadata"] = {}
        del one["id"]


@case("GRADED", PLAIN)
def two_answers_that_changed_their_ids(notebook: Notebook, folder: Path) -> None:
    """Cell ids are the editor's; the grade_id counts."""
    scale, quantise = cell(notebook, "scale"), cell(notebook, "quantise")
    scale["id"], quantise["id"] = "quantise", "scale"


@case("GRADED", PLAIN)
def every_cell_with_the_same_id(notebook: Notebook, folder: Path) -> None:
    for one in notebook["cells"]:
        if one["cell_type"] == "code" and "nbgrader" in one["metadata"]:
            one["id"] = "twin"


@case("GRADED", PLAIN)
def ids_of_every_wrong_type(notebook: Notebook, folder: Path) -> None:
    for one, odd in zip(notebook["cells"], [None, 1, ["a"], {"a": 1}, "x" * 10_000, "../../x", "\ud800"] * 9):
        if "nbgrader" in one["metadata"]:
            one["id"] = odd


@case(WARN, PLAIN, "appears twice")
def a_question_answered_twice(notebook: Notebook, folder: Path) -> None:
    """The first attempt is still above the second."""
    place = notebook["cells"].index(cell(notebook, "scale"))
    first = copy.deepcopy(cell(notebook, "scale"))
    first["source"] = WRONG
    notebook["cells"].insert(place, first)


@case("GRADED", PLAIN)
def a_grade_id_that_nobody_knows(notebook: Notebook, folder: Path) -> None:
    extra = own_cell("mine = 1")
    extra["metadata"] = {
        "nbgrader": {
            "grade_id": "test_bonus",
            "grade": True,
            "points": 100,
            "solution": False,
            "schema_version": 3,
        }
    }
    notebook["cells"].append(extra)


# -- cells


@case(WARN, PLAIN)
def cells_in_reverse_order(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].reverse()
    notebook["cells"].append(copy.deepcopy(cell(notebook, "scale")))


@case("GRADED", PLAIN)
def an_answer_as_markdown(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["cell_type"] = "markdown"


@case("GRADED", PLAIN)
def an_answer_as_a_raw_cell(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["cell_type"] = "raw"


@case(WARN, REST, "cell `scale` was missing")
def an_answer_deleted(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].remove(cell(notebook, "scale"))


@case("GRADED", REST, "not attempted")
def an_answer_emptied(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = ""


@case("GRADED", REST)
def a_source_that_is_none(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = None


@case("GRADED", REST)
def a_source_of_numbers(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = [1, None, {"a": "b"}, ["def absmax_scale(x): pass"]]


@case("GRADED", PLAIN)
def sources_as_lists_of_lines(notebook: Notebook, folder: Path) -> None:
    for one in notebook["cells"]:
        one["source"] = one["source"].splitlines(keepends=True)


@case(WARN, REST, "given cell `setup` was edited")
def the_set_up_edited(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "setup")["source"] = "class lab:\n    check = staticmethod(lambda name: 3.0)\n"
    cell(notebook, "scale")["source"] = WRONG


@case("GRADED", PLAIN)
def the_set_up_deleted(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].remove(cell(notebook, "setup"))


@case(WARN, PLAIN, "ended the process: it was left out")
def twenty_cells_that_each_end_the_process(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] += [own_cell("import os; os._exit(0)", f"mine{number}") for number in range(20)]


@case("GRADED", PLAIN)
def ten_thousand_cells(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] += [own_cell("") for _ in range(10_000)]


@case("GRADED", PLAIN)
def ten_thousand_empty_cells_before_the_work(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] = [own_cell("", f"x{number}") for number in range(10_000)] + notebook["cells"]


@case(WARN, PLAIN, "more than 1 MB of code")
def five_thousand_large_cells(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] += [
        own_cell(f"x{number} = {list(range(200))}\n" * 20, f"x{number}") for number in range(5_000)
    ]


@case("GRADED", PLAIN)
def two_answers_that_changed_places(notebook: Notebook, folder: Path) -> None:
    scale, quantise = cell(notebook, "scale"), cell(notebook, "quantise")
    scale["source"], quantise["source"] = quantise["source"], scale["source"]


@case("GRADED", PLAIN)
def tags_and_locks_of_ones_own(notebook: Notebook, folder: Path) -> None:
    for one in notebook["cells"]:
        one["metadata"] |= {
            "tags": ["demo", "hide-input"],
            "editable": False,
            "deletable": False,
            "collapsed": True,
        }


@case("GRADED", PLAIN)
def an_answer_of_a_megabyte_of_comments(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] += "\n" + "# and so on\n" * 90_000


@case("GRADED", REST)
def an_answer_that_no_parser_can_hold(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "absmax_scale = lambda x: " + "(" * 30_000 + "x" + ")" * 30_000


@case("GRADED", REST)
def an_answer_with_zeros_and_halves_of_characters(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "x = '\x00\ud800\u202e'\n" + WRONG


@case("GRADED", REST)
def an_answer_that_is_a_tower(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "absmax_scale = lambda x: use_reference" + ".a" * 20_000


@case(WARN, PLAIN, "more than 1 MB of code")
def a_cell_of_twenty_megabytes_of_short_lines(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].insert(0, own_cell("absmax_scale = 1\n" * 1_200_000))

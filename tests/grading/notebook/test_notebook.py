"""The notebook's side: immediate verdicts, hints one by one, references without points, stored progress."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir
from dlo_lib.grading import Lab
from dlo_lib.grading.lab.course import IN_GRADING_FILE, QUIZ_ANSWERS_FILE
from dlo_lib.grading.lab.quiz_answers import quiz_answers_text
from dlo_lib.grading.lab.references import references_text
from dlo_lib.grading.lab.release import in_grading_text, release_lab
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.notebook.progress import read_progress, standings

Run = Callable[[str], None]


@pytest.fixture
def namespace() -> dict[str, Any]:
    return {"__name__": "__main__", "torch": torch, "dist": dist}


@pytest.fixture
def lab(namespace: dict[str, Any], small: LabSource, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab") / small.info.directory
    shutil.copytree(small.given, folder)
    (folder / "references.json").write_text(references_text(small))
    return Lab(namespace, folder)


@pytest.fixture
def run(namespace: dict[str, Any]) -> Run:
    def run_cell(source: str) -> None:
        exec(compile(source, "<cell here>", "exec"), namespace)

    return run_cell


def solve(run: Run, small: LabSource, *questions: str) -> None:
    for question in questions:
        run(small.solution(question).source)


def test_solved_questions_earn_their_visible_points(
    lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str]
) -> None:
    solve(run, small, "scale", "quantise", "mean", "quiz")
    assert [float(lab.check(question)) for question in small.questions] == [2, 3, 1, 1]
    assert capsys.readouterr().out.count("All checks pass") == 4


def test_a_verdict_names_what_grading_adds(
    namespace: dict[str, Any], run: Run, small: LabSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / small.info.directory
    shutil.copytree(small.given, folder)
    (folder / IN_GRADING_FILE).write_text(in_grading_text(small.folder))
    lab = Lab(namespace, folder)
    run("def absmax_scale(x):\n    return x")
    more = "1 more point is judged in grading: Scales are float32 whatever x is\n"
    lab.check("scale")
    assert re.search(rf"^scale: 0 of 2 points here \(\d+ ms\); {more}", capsys.readouterr().out)
    solve(run, small, "scale", "quiz")
    score, quiz = lab.check("scale"), lab.check("quiz")
    assert (float(score), float(quiz)) == (2, 1)
    said = capsys.readouterr().out
    assert re.search(rf"scale: 2 of 2 points here \(\d+ ms\); {more}", said)
    assert re.search(
        r"quiz: 1 of 1 points here \(\d+ ms\); 2 more points are judged in grading: The answers are right\n",
        said,
    )
    assert said.count("All checks pass: continue.") == 2
    assert score._repr_html_() == "2 of 2 points here"  # the same total below the verdict
    (folder / IN_GRADING_FILE).write_text('{"scale": 3}')
    with pytest.raises(UserError, match="in_grading.json is damaged: `dlo lab` restores it"):
        Lab(namespace, folder)


def test_a_standard_form_passes_the_same_checks(
    lab: Lab, run: Run, small: LabSource, namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """``instead`` checks another value of a name, records nothing, and leaves the notebook as it is."""
    solve(run, small, "scale")
    right = namespace["absmax_scale"]
    assert lab.check("scale") > 0
    before = dict(read_progress(small.info.directory).earned)
    capsys.readouterr()
    assert lab.check("scale", instead={"absmax_scale": lambda x: None}) == 0
    assert "in grading" not in capsys.readouterr().out
    assert namespace["absmax_scale"] is right
    assert read_progress(small.info.directory).earned == before


def test_the_text_of_a_score_is_a_number_for_nbgrader(lab: Lab, run: Run, small: LabSource) -> None:
    run("def absmax_scale(x):\n    return x.float().amax(dim=1) / 127")
    score = lab.check("scale", seed=1)
    assert repr(score) == "1.0"
    assert score._repr_html_() == "1 of 2 points"


@pytest.mark.parametrize("question", ["scale", "mean"])
def test_an_untouched_cell_is_not_written_yet(
    lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    run(small.solution(question).released)
    assert lab.check(question) == 0
    told = capsys.readouterr().out
    assert "not written yet" in told
    assert "Error" not in told


@pytest.mark.parametrize(("question", "name"), [("scale", "absmax_scale"), ("mean", "all_reduce_mean")])
def test_an_earlier_step_that_is_not_written_is_named(
    lab: Lab, run: Run, capsys: pytest.CaptureFixture[str], question: str, name: str
) -> None:
    run(f"def earlier(x):\n    raise NotImplementedError()\n\ndef {name}(x):\n    return earlier(x)")
    assert lab.check(question) == 0
    assert "`earlier` is not written yet" in capsys.readouterr().out


def test_a_cell_that_was_not_run_is_named(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.check("scale")
    assert "`absmax_scale` is not defined: run the cell that defines it" in capsys.readouterr().out


def test_a_failed_check_names_the_earlier_step_that_is_not_right(
    lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str]
) -> None:
    run("def absmax_scale(x):\n    return torch.zeros(len(x))")
    solve(run, small, "quantise")
    assert lab.check("quantise") < 3
    told = capsys.readouterr().out
    assert 'This step uses the step "scale", whose check was not run yet: run lab.check("scale").' in told
    lab.check("scale")
    capsys.readouterr()
    lab.check("quantise")
    told = capsys.readouterr().out
    assert re.search(
        r'This step uses the step "scale", whose last check gave \d of 2 points: correct it first', told
    )
    lab.use_reference("scale")
    lab.check("quantise")
    assert "This step uses" not in capsys.readouterr().out
    solve(run, small, "scale")
    lab.check("scale")
    run("def quantise(x):\n    return x")
    capsys.readouterr()
    lab.check("quantise")
    assert "This step uses" not in capsys.readouterr().out


def test_an_exception_is_one_line_with_the_students_own_line(
    lab: Lab, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("def absmax_scale(x):\n    return x.abs().nonsense()")
    lab.check("scale")
    told = capsys.readouterr().out
    assert "AttributeError" in told
    assert "(line 2 of cell `here`" in told
    assert "Traceback" not in told


def test_an_exception_on_a_rank_names_the_rank(
    lab: Lab, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("def all_reduce_mean(x):\n    if dist.get_rank() == 1: raise KeyError('lost')\n    dist.barrier()")
    assert lab.check("mean") == 0
    told = capsys.readouterr().out
    assert "rank 1 raised KeyError: 'lost'" in told


def test_a_not_implemented_error_of_torch_is_reported(
    lab: Lab,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("def absmax_scale(x):\n    return x.to_sparse().detach().as_subclass(torch.Tensor)")
    lab.check("scale")
    told = capsys.readouterr().out
    assert "NotImplementedError" in told
    assert "not written yet" not in told


def test_only_plain_data_passes_in_the_notebook(
    lab: Lab,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("class Yes:\n    def __eq__(self, other): return True\ndef absmax_scale(x):\n    return Yes()")
    assert lab.check("scale") == 0
    assert "your code returned an object of type Yes" in capsys.readouterr().out


def test_a_function_cannot_change_the_inputs_of_a_check(lab: Lab, run: Run) -> None:
    """If a function could zero x, every comparison with x would pass."""
    run("def absmax_scale(x):\n    x.zero_()\n    return torch.ones(len(x))")
    assert lab.check("scale") == 1


def test_a_seed_repeats_the_inputs(lab: Lab, run: Run, namespace: dict[str, Any]) -> None:
    run("seen = []\ndef absmax_scale(x):\n    seen.append(x)\n    return x.amax(1)")
    for seed in (7, 7, 8):
        lab.check("scale", seed=seed)
    first, _, again, _, other, _ = namespace["seen"]
    assert torch.equal(first, again)
    assert not (first.shape == other.shape and torch.equal(first, other))


def test_warnings_stay_off_stderr(lab: Lab, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """nbgrader's execution gives 0 points to a test cell with output on stderr."""
    run(
        "import sys\ndef absmax_scale(x):\n    print('hm', file=sys.stderr)\n"
        "    return x.float().abs().amax(dim=1) / 127"
    )
    assert lab.check("scale") == 2
    assert capfd.readouterr().err == ""


def test_hints_come_one_by_one_and_are_remembered(
    lab: Lab, namespace: dict[str, Any], small: LabSource, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.hint("scale")
    assert capsys.readouterr().out.count("Hint") == 1
    Lab(namespace, small.given).hint("scale")  # after a restart of the kernel
    assert capsys.readouterr().out.count("Hint") == 2
    for _ in range(3):
        lab.hint("scale")
    last = capsys.readouterr().out
    assert "Hint 3 of 3" in last
    assert "Hint 4" not in last


def test_the_reference_lets_later_steps_work_without_points(
    lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.use_reference("scale")
    solve(run, small, "quantise")
    assert lab.check("quantise") == 3
    assert lab.check("scale") == 0
    assert "no points" in capsys.readouterr().out
    solve(run, small, "scale")
    assert lab.check("scale") == 2


def test_the_quiz_shows_questions_and_requires_every_answer(
    lab: Lab,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab.quiz()
    assert "How many values does int8 have?" in capsys.readouterr().out
    for answers, told in [
        ('{"q1": "", "q2": "a"}', "no answer yet to q1"),
        ('{"q1": "z", "q2": "a"}', "one of a, b"),
        ("[1]", "should be a dict"),
    ]:
        run(f"quiz = {answers}")
        assert lab.check("quiz") == 0
        assert told in capsys.readouterr().out


@pytest.fixture
def with_answers(lab: Lab, small: LabSource, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Give the lab its file of answers; the value says whether a class has an exchange."""
    (lab._folder / QUIZ_ANSWERS_FILE).write_text(quiz_answers_text(small.folder))
    in_class = [False]
    monkeypatch.setattr("dlo_lib.grading.notebook.quiz.has_class", lambda: in_class[0])
    return in_class


REASONS = "✓ q1: 8 bits make 2**8 values\n✗ q2: zero divided by the scale is zero (right: a)\n"


def test_a_person_alone_reads_the_reasons_after_three_complete_answers(
    lab: Lab, run: Run, with_answers: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    lab.quiz()
    assert "After 3 checks" in capsys.readouterr().out
    for answers, told in [
        ('{"q1": "", "q2": "b"}', False),  # not complete: does not count
        ('{"q1": "b", "q2": "b"}', False),
        ('{"q1": "b", "q2": "b"}', False),
        ('{"q1": "b", "q2": "b"}', True),
    ]:
        run(f"quiz = {answers}")
        lab.check("quiz")
        assert (REASONS in capsys.readouterr().out) is told
    assert read_progress("91_small").earned["quiz"] == 1  # the reasons change no points


def test_the_reasons_are_revealed_to_a_person_alone_only(
    lab: Lab, run: Run, with_answers: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    lab.quiz.reveal()  # before any answer
    assert capsys.readouterr().out.count("✗") == 2
    run('quiz = {"q1": "b", "q2": "b"}')
    lab.quiz.reveal()
    assert capsys.readouterr().out == REASONS
    with_answers[0] = True
    lab.quiz()
    for _ in range(4):
        lab.check("quiz")
    lab.quiz.reveal()
    said = capsys.readouterr().out
    assert "8 bits" not in said
    assert "After 3" not in said
    assert "your instructor decides" in said


def test_without_its_file_a_lab_has_no_answers(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.quiz.reveal()
    assert "no answers of the quiz: `dlo lab` brings them" in capsys.readouterr().out


def test_hidden_checks_run_only_in_stock_grading(
    lab: Lab,
    namespace: dict[str, Any],
    run: Run,
    small: LabSource,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("checks/questions.py", "lab.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((small.given / name).read_bytes())
    solve(run, small, "scale", "quiz")
    monkeypatch.setenv("DLO_HIDDEN", str(small.folder))
    grading = Lab(namespace, tmp_path)
    assert (grading.check("scale"), grading.check("quiz")) == (3, 3)
    assert (lab.check("scale"), lab.check("quiz")) == (2, 1)


def test_progress_is_kept(lab: Lab, run: Run, small: LabSource) -> None:
    run(small.solution("scale").source)
    lab.check("scale")
    lab.check("quantise")
    kept = read_progress("91_small")
    assert (kept.earned, kept.possible) == ({"scale": 2.0, "quantise": 0.0}, {"scale": 2.0, "quantise": 3.0})


def test_standings_show_the_progress(
    run: Run, namespace: dict[str, Any], small: LabSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small.folder.parents[1], tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    release_lab(small.info)
    assert [(row.points, row.earned, row.state) for row in standings()] == [(12, 0, "not started")]
    lab = Lab(namespace, tmp_path / "labs" / "91_small")
    lab.hint("scale")
    assert standings()[0].state == "started"
    solve(run, small, *small.questions)
    for question in small.questions:
        lab.check(question)
    assert [(row.earned, row.state) for row in standings()] == [(7, "done")]


def test_a_damaged_record_is_ignored(lab: Lab, run: Run, small: LabSource) -> None:
    lab.hint("scale")

    (state_dir() / "progress" / "91_small.json").write_text('{"hints"')
    assert read_progress("91_small").hints == {}


def test_bad_names_get_the_nearest_ones(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean scale"):
        lab.check("scales")
    with pytest.raises(UserError, match="no reference"):
        lab.use_reference("mean")
    with pytest.raises(UserError, match="in its folder"):
        Lab({}, tmp_path)


def test_the_verdict_stands_above_a_short_output_of_the_students_code(
    lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small.solution("scale").source
    run(source.replace("    return", "    print('called\\n' * 9999)\n    return", 1))
    lab.check("scale")
    said = capsys.readouterr().out
    assert said.startswith("scale: ")
    assert said.count("called") == 50
    assert "more lines, all of them in" in said
    assert str(state_dir() / "output" / "91_small-scale.txt") in said


def test_what_ranks_print_is_shortened_too(
    lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small.solution("mean").source
    run(source.replace("    return", "    print('from a rank\\n' * 999)\n    return", 1))
    assert float(lab.check("mean")) == 1
    said = capsys.readouterr().out
    assert said.startswith("mean: ")
    assert 0 < said.count("from a rank") <= 50
    assert "more lines, all of them in" in said

"""The notebook's side: a check answers at once, hints come one by one, the reference costs its points, progress is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_lib.errors import UserError
from dlo_lib.grading import Lab
from dlo_lib.grading.progress import read_progress, standings
from dlo_lib.grading.release import release_lab
from dlo_lib.grading.source import LabSource

Run = Callable[[str], None]


@pytest.fixture
def namespace() -> dict[str, Any]:
    return {"__name__": "__main__", "torch": torch, "dist": dist}


@pytest.fixture
def lab(namespace: dict[str, Any], small: LabSource) -> Lab:
    return Lab(namespace, small.folder)


@pytest.fixture
def run(namespace: dict[str, Any]) -> Run:
    def run_cell(source: str) -> None:
        exec(compile(source, "<cell here>", "exec"), namespace)

    return run_cell


def solve(run: Run, small: LabSource, *questions: str) -> None:
    for question in questions:
        run(small.solution(question).source)


def test_solved_questions_earn_their_visible_points(lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str]) -> None:
    solve(run, small, "scale", "quantise", "mean", "quiz")
    assert [float(lab.check(question)) for question in small.questions] == [2, 3, 1, 1]
    assert capsys.readouterr().out.count("All checks pass") == 4


def test_the_text_of_a_score_is_the_number_that_nbgrader_reads(lab: Lab, run: Run, small: LabSource) -> None:
    run("def absmax_scale(x):\n    return x.float().amax(dim=1) / 127")
    score = lab.check("scale")
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


def test_a_cell_that_was_not_run_is_named(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.check("scale")
    assert "`absmax_scale` is not defined: run the cell that defines it" in capsys.readouterr().out


def test_an_exception_is_one_line_with_the_students_own_line(lab: Lab, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("def absmax_scale(x):\n    return x.abs().nonsense()")
    lab.check("scale")
    told = capsys.readouterr().out
    assert "AttributeError" in told
    assert "(line 2 of cell `here`" in told
    assert "Traceback" not in told


def test_an_exception_on_a_rank_names_the_rank(lab: Lab, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("def all_reduce_mean(x):\n    if dist.get_rank() == 1: raise KeyError('lost')\n    dist.barrier()")
    assert lab.check("mean") == 0
    told = capsys.readouterr().out
    assert "rank 1 raised KeyError: 'lost'" in told


def test_torchs_own_not_implemented_error_is_told(lab: Lab, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("def absmax_scale(x):\n    return x.to_sparse().detach().as_subclass(torch.Tensor)")
    lab.check("scale")
    told = capsys.readouterr().out
    assert "NotImplementedError" in told
    assert "not written yet" not in told


def test_what_is_no_plain_data_does_not_pass_here_either(lab: Lab, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("class Yes:\n    def __eq__(self, other): return True\ndef absmax_scale(x):\n    return Yes()")
    assert lab.check("scale") == 0
    assert "your code returned an object of type Yes" in capsys.readouterr().out


def test_a_function_cannot_change_the_checks_own_inputs(lab: Lab, run: Run) -> None:
    """Zeroing x would make every comparison with it true."""
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
    """Stock nbgrader gives 0 to a test cell with anything there."""
    run("import sys\ndef absmax_scale(x):\n    print('hm', file=sys.stderr)\n    return x.float().abs().amax(dim=1) / 127")
    assert lab.check("scale") == 2
    assert capfd.readouterr().err == ""


def test_hints_come_one_by_one_and_are_remembered(
    lab: Lab, namespace: dict[str, Any], small: LabSource, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.hint("scale")
    assert capsys.readouterr().out.count("Hint") == 1
    Lab(namespace, small.folder).hint("scale")  # after a restart of the kernel
    assert capsys.readouterr().out.count("Hint") == 2
    for _ in range(3):
        lab.hint("scale")
    last = capsys.readouterr().out
    assert "Hint 3 of 3" in last
    assert "Hint 4" not in last


def test_the_reference_lets_one_go_on_without_points(lab: Lab, run: Run, small: LabSource, capsys: pytest.CaptureFixture[str]) -> None:
    lab.use_reference("scale")
    solve(run, small, "quantise")
    assert lab.check("quantise") == 3
    assert lab.check("scale") == 0
    assert "no points" in capsys.readouterr().out
    solve(run, small, "scale")
    assert lab.check("scale") == 2


def test_the_quiz_shows_questions_and_wants_every_answer(lab: Lab, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_hidden_checks_run_only_where_stock_grading_says_where_they_are(
    lab: Lab, namespace: dict[str, Any], run: Run, small: LabSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("checks.py", "lab.toml"):
        (tmp_path / name).write_bytes((small.folder / name).read_bytes())
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


def test_standings_tell_how_far_one_is(
    run: Run, namespace: dict[str, Any], small: LabSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "solutions").mkdir()
    (tmp_path / "labs").mkdir()
    (tmp_path / "solutions" / "91_small").symlink_to(small.folder)
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    release_lab(small.info)
    (small.folder / small.info.notebook).unlink()
    assert [(row.points, row.earned, row.state) for row in standings()] == [(12, 0, "not started")]
    lab = Lab(namespace, tmp_path / "labs" / "91_small")
    lab.hint("scale")
    assert standings()[0].state == "started"
    solve(run, small, *small.questions)
    for question in small.questions:
        lab.check(question)
    assert [(row.earned, row.state) for row in standings()] == [(7, "done")]


def test_a_damaged_record_counts_as_none(lab: Lab, run: Run, small: LabSource) -> None:
    lab.hint("scale")
    from dlo_lib.files import state_dir

    (state_dir() / "progress" / "91_small.json").write_text('{"hints"')
    assert read_progress("91_small").hints == {}


def test_bad_names_get_the_nearest_ones(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean scale"):
        lab.check("scales")
    with pytest.raises(UserError, match="no reference"):
        lab.use_reference("mean")
    with pytest.raises(UserError, match="in its own folder"):
        Lab({}, tmp_path)

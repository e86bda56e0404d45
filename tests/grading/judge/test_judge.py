"""The judge: honest work gets its points beside any other cells, and points need a proof.

Most tests submit the reference solution with one change, and state what it may cost and what it may not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.judge.judge import judge_answer, judge_notebook, visible_report
from dlo_lib.grading.judge.report import Report
from dlo_lib.grading.judge.time_budget import TimeBudget
from dlo_lib.grading.lab.modules import LabChecks, load_checks
from dlo_lib.grading.lab.mutants import read_mutants
from dlo_lib.grading.lab.release import release_lab
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.sandbox.host import Zygote

Judge = Callable[..., Report]
Notebook = dict[str, Any]
Patch = pytest.MonkeyPatch

FULL = {"scale": 3.0, "quantise": 4.0, "mean": 2.0, "quiz": 3.0}
ALWAYS_EQUAL = """
class Yes:
    def __getattr__(self, name): return Yes()
    def __eq__(self, other): return True
    def __bool__(self): return True
    def __call__(self, *args): return Yes()
def absmax_scale(x):
    return Yes()
"""
WRONG = "def absmax_scale(x):\n    return None"


def answer(notebook: Notebook, **answers: str) -> Notebook:
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], cell["source"])
    return notebook


def extra(notebook: Notebook, source: str, at: int = 2) -> Notebook:
    cell = {
        "cell_type": "code",
        "id": f"own{at}",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
        "source": source,
    }
    notebook["cells"].insert(at, cell)
    return notebook


def points(report: Report) -> dict[str, float]:
    return {name: question.points for name, question in report.questions.items()}


def messages(report: Report, question: str) -> str:
    return " | ".join(check.message for check in report.questions[question].checks)


def cell_of(notebook: Notebook, identity: str) -> Notebook:
    return next(cell for cell in notebook["cells"] if cell["id"] == identity)


def hurry(monkeypatch: Patch, seconds: float) -> None:
    """Limit the time of every check."""

    def quick(checks: tuple[Check, ...]) -> tuple[Check, ...]:
        return tuple(replace(check, seconds=min(seconds, check.seconds)) for check in checks)

    def load(*folders: Path) -> LabChecks:
        checks = load_checks(*folders)
        return replace(checks, visible=quick(checks.visible), hidden=quick(checks.hidden))

    monkeypatch.setattr("dlo_lib.grading.judge.judge.load_checks", load)


# -- honest submissions


def test_the_reference_gets_full_marks(judge: Judge, reference: Notebook, small: LabSource) -> None:
    report = judge(reference)
    assert report.status == "GRADED"
    assert points(report) == FULL
    assert report.points == report.maximum == small.points


def test_judging_again_gives_the_same_report(judge: Judge, reference: Notebook) -> None:
    answer(reference, scale="def absmax_scale(x):\n    return x.float().amax(dim=1) / 127")
    assert judge(reference) == judge(reference)


def test_the_untouched_notebook_is_no_attempt(judge: Judge, reference: Notebook, small: LabSource) -> None:
    answer(reference, **{cell.id: cell.released for cell in small.cells})
    report = judge(reference)
    assert report.status == "NO_ATTEMPT"
    assert report.points == 0
    assert report.maximum == small.points
    assert {check.message for question in report.questions.values() for check in question.checks} == {
        "not attempted"
    }


def test_only_the_visible_checks_when_asked(judge: Judge, reference: Notebook) -> None:
    report = judge(reference, visible_only=True)
    assert points(report) == {"scale": 2.0, "quantise": 3.0, "mean": 1.0, "quiz": 1.0}
    assert report.maximum == report.points


def test_a_failed_step_costs_no_points_in_the_next_one(judge: Judge, reference: Notebook) -> None:
    """quantise calls absmax_scale: when it is judged alone, it gets the reference."""
    report = judge(answer(reference, scale="def absmax_scale(x):\n    return x.float().amax(dim=1) / 12700"))
    assert report.questions["scale"].points < 3
    assert points(report) | {"scale": 3.0} == FULL


def test_partial_credit_is_by_check(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, scale="def absmax_scale(x):\n    return x.abs().amax(dim=1) / 127"))
    assert report.questions["scale"].points == 2
    assert "expected float32" in messages(report, "scale")


def test_a_warning_on_stderr_costs_nothing(judge: Judge, reference: Notebook) -> None:
    noisy = (
        "import sys, warnings\nwarnings.warn('hm')\ndef absmax_scale(x):\n    print('x', file=sys.stderr)\n"
        "    "
    )
    report = judge(answer(reference, scale=noisy + "return x.float().abs().amax(1) / 127"))
    assert points(report) == FULL
    assert report.status == "GRADED"


def test_helpers_in_added_cells_are_kept(judge: Judge, reference: Notebook) -> None:
    extra(
        reference,
        "%config InlineBackend.figure_format = 'png'\ndef largest(x):\n"
        "    return x.float().abs().amax(dim=1)",
    )
    report = judge(answer(reference, scale="%%time\ndef absmax_scale(x):\n    return largest(x) / 127"))
    assert report.questions["scale"].points == 3


def test_an_exception_is_reported_with_the_students_line(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, scale="def absmax_scale(x):\n    y = x.abs()\n    return y.amax(dim=7)"))
    assert "IndexError" in messages(report, "scale")
    assert "line 3 of cell `scale`: `return y.amax(dim=7)`" in messages(report, "scale")


def test_a_cell_with_a_syntax_error_is_reported(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, scale="def absmax_scale(x)\n    return x"))
    assert report.questions["scale"].points == 0
    assert "SyntaxError" in messages(report, "scale")
    assert points(report) | {"scale": 3.0} == FULL


def test_a_question_answered_by_the_reference_earns_nothing_with_a_note(
    judge: Judge,
    reference: Notebook,
) -> None:
    report = judge(extra(reference, 'lab.use_reference("scale")'))
    assert points(report) == FULL | {"scale": 0.0}
    assert "use_reference" in report.questions["scale"].note


def test_quiz_answers_are_graded_one_by_one(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, quiz='quiz = {"q1": "a", "q2": "a"}'))
    assert report.questions["quiz"].points == 2
    assert "8 bits" in messages(report, "quiz")


@pytest.mark.parametrize(
    "changing",
    [
        # another answer when the cell of an earlier question is the reference's, as it is when judged alone
        'quiz = {"q1": "a", "q2": "a"} if "tried" in globals() else {"q1": "b", "q2": "b"}',
        # other answers at each reading
        """
from dlo_lib.grading.sandbox import worker
quiz, turns, look = {}, [], worker._lookup
def _lookup(names, name):
    if name != "quiz":
        return look(names, name)
    turns.append(name)
    return dict.fromkeys(("q1", "q2"), "ab"[len(turns) % 2 == 0])
worker._lookup = _lookup
""",
    ],
    ids=["by the cells around", "by the reading"],
)
def test_a_quiz_has_one_try(judge: Judge, reference: Notebook, changing: str) -> None:
    report = judge(answer(reference, scale="tried = True\ndef absmax_scale(x): return None", quiz=changing))
    assert report.questions["quiz"].points <= 2, messages(report, "quiz")


def test_a_quiz_is_read_again_after_a_cell_has_ended_the_process(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, scale="import os; os._exit(1)"))
    assert points(report) == FULL | {"scale": 0.0}


# -- submissions that a grader must survive (the numbers are those of the list of inputs)


def test_1_an_answer_that_equals_everything(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, scale=ALWAYS_EQUAL))
    assert report.questions["scale"].points == 0
    assert "an object of type Yes" in messages(report, "scale")


def test_2_and_3_transformers_change_no_other_cell(judge: Judge, reference: Notebook) -> None:
    hooks = """
import ast
ip = get_ipython()
ip.input_transformers_post.append(lambda lines: ["pass\\n"])
ip.input_transformer_manager.cleanup_transforms.append(lambda lines: ["pass\\n"])
class Strip(ast.NodeTransformer):
    def visit_Assert(self, node): return None
ip.ast_transformers.append(Strip())
"""
    report = judge(extra(answer(reference, scale=WRONG), hooks))
    assert points(report) == FULL | {"scale": 0.0}


def test_7_secrets_are_not_in_the_environment(judge: Judge, reference: Notebook) -> None:
    """The fixture starts the zygote with CLASS_SECRET in the environment of the judge."""
    leak = "import os\ndef absmax_scale(x):\n    raise ValueError(sorted(os.environ))"
    told = messages(judge(answer(reference, scale=leak)), "scale")
    assert "PATH" in told
    assert "CLASS_SECRET" not in told


@pytest.mark.parametrize(
    "end",
    [
        "import os; os._exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
    ],
)
def test_8_a_cell_that_ends_the_process_costs_its_question(
    judge: Judge, reference: Notebook, end: str
) -> None:
    report = judge(answer(reference, scale=end))
    assert report.questions["scale"].status == report.status == "KERNEL_DIED"
    assert "in cell `scale`" in messages(report, "scale")
    assert points(report) == FULL | {"scale": 0.0}


def test_8_a_function_that_ends_the_process_costs_its_question(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, scale="import os\ndef absmax_scale(x):\n    os._exit(3)"))
    assert report.questions["scale"].status == "KERNEL_DIED"
    assert "exit code 3" in messages(report, "scale")
    assert points(report) | {"quantise": 4.0} == FULL | {"scale": 0.0}


def test_an_added_cell_that_ends_the_process_costs_nothing(judge: Judge, reference: Notebook) -> None:
    assert points(judge(extra(reference, "import os; os._exit(0)"))) == FULL


@pytest.mark.parametrize(
    "later",
    ["%reset -f", "def absmax_scale(x): return x  # another idea, for the next step", "del absmax_scale"],
)
def test_an_added_cell_below_the_tests_removes_no_points(
    judge: Judge,
    reference: Notebook,
    later: str,
) -> None:
    assert points(judge(extra(reference, later, at=len(reference["cells"])))) == FULL


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "quit()", "exit", "raise KeyboardInterrupt"])
def test_9_exiting_costs_its_question(judge: Judge, reference: Notebook, leave: str) -> None:
    assert points(judge(answer(reference, scale=leave))) == FULL | {"scale": 0.0}


def test_10_an_endless_function_that_swallows_interrupts(
    judge: Judge, reference: Notebook, monkeypatch: Patch
) -> None:
    hurry(monkeypatch, 0.5)
    endless = (
        "def absmax_scale(x):\n    while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass"
    )
    report = judge(answer(reference, scale=endless))
    assert report.questions["scale"].status == report.status == "TIMEOUT"
    assert points(report) == FULL | {"scale": 0.0}


LOOPS = {
    "scale": "def absmax_scale(x):\n    while True: pass",
    "quantise": "def quantise(x):\n    while True: pass",
    "mean": "def all_reduce_mean(x):\n    while True: pass",
}


def test_an_endless_loop_in_each_answer_is_tried_once_after_two_limits(
    judge: Judge, reference: Notebook, monkeypatch: Patch
) -> None:
    hurry(monkeypatch, 0.5)
    limits: list[str] = []
    note = TimeBudget.note

    def noted(budget: TimeBudget, error: Exception) -> None:
        limits.append(str(error))
        note(budget, error)

    monkeypatch.setattr(TimeBudget, "note", noted)
    report = judge(answer(reference, **LOOPS))
    assert points(report) == FULL | dict.fromkeys(LOOPS, 0.0)
    # scale and quantise in order and alone, mean only alone
    assert len(limits) == 5
    assert all(limit.startswith("no answer in time") for limit in limits)


def test_right_answers_below_endless_loops_keep_their_points(
    judge: Judge, reference: Notebook, monkeypatch: Patch
) -> None:
    """The answer to ``mean`` needs a function of the cell above, which it does not have when it is judged
    alone."""
    hurry(monkeypatch, 0.5)
    helper = "\ndef world(): return dist.get_world_size()"
    mean = "def all_reduce_mean(x):\n    y = x.clone()\n    dist.all_reduce(y)\n    return y / world()"
    loops = {"scale": LOOPS["scale"], "quantise": LOOPS["quantise"] + helper}
    report = judge(answer(reference, **loops, mean=mean))
    assert points(report) == FULL | dict.fromkeys(loops, 0.0)


def test_10_an_endless_cell(judge: Judge, reference: Notebook, monkeypatch: Patch) -> None:
    monkeypatch.setattr(TimeBudget, "load_seconds", lambda self, full: full / 10)
    report = judge(answer(reference, scale="while True: pass"))
    assert report.questions["scale"].status == "TIMEOUT"
    assert "in cell `scale`" in messages(report, "scale")
    assert points(report) == FULL | {"scale": 0.0}


def test_11_too_much_memory(judge: Judge, reference: Notebook, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Zygote, "worker", partialmethod(Zygote.worker, memory=64 << 20))
    greedy = "held = []\ndef absmax_scale(x):\n    while True: held.append(torch.ones(2**20))"
    report = judge(answer(reference, scale=greedy))
    assert report.questions["scale"].status == report.status == "OOM"
    assert points(report) == FULL | {"scale": 0.0}


def test_12_much_output_is_cut_with_a_warning(judge: Judge, reference: Notebook) -> None:
    report = judge(extra(reference, "for _ in range(200):\n    print('x' * 10**6)"))
    assert points(report) == FULL
    assert report.status == "GRADED_WARN"
    assert report.warnings == ("long output was cut",)


def _edited(test: Notebook) -> None:
    test["source"] = "1000.0"
    test["metadata"]["nbgrader"]["points"] = 1000


def _ungraded(test: Notebook) -> None:
    test["metadata"]["nbgrader"]["grade"] = False


@pytest.mark.parametrize("spoil", [_edited, _ungraded], ids=["13", "14"])
def test_13_14_an_edited_test_cell_is_replaced(
    judge: Judge,
    reference: Notebook,
    spoil: Callable[[Notebook], None],
) -> None:
    spoil(cell_of(reference, "test_scale"))
    report = judge(answer(reference, scale=WRONG))
    assert report.status == "GRADED_WARN"
    assert "TAMPER(test cell `test_scale`" in report.warnings[0]
    assert points(report) == FULL | {"scale": 0.0}


def test_15_a_deleted_test_cell_is_restored(judge: Judge, reference: Notebook) -> None:
    reference["cells"].remove(cell_of(reference, "test_scale"))
    report = judge(reference)
    assert points(report) == FULL
    assert report.status == "GRADED_WARN"


def test_16_a_copied_test_cell_and_a_second_answer(judge: Judge, reference: Notebook) -> None:
    reference["cells"].append({**cell_of(reference, "test_scale"), "id": "another"})
    reference["cells"].append({**cell_of(reference, "scale"), "id": "one-more"})
    report = judge(reference)
    assert points(report) == FULL
    assert report.status == "GRADED_WARN"


@pytest.mark.parametrize(
    "metadata", [{}, {"schema_version": 1}, {"schema_version": 99, "grade_id": 7}, [], "nbgrader"]
)
def test_17_broken_metadata_is_rebuilt(judge: Judge, reference: Notebook, metadata: object) -> None:
    for cell in reference["cells"]:
        cell["metadata"]["nbgrader"] = metadata
        cell.pop("id")
    assert points(judge(reference)) == FULL


def test_18_a_renamed_notebook_is_found_by_its_id(judge: Judge, reference: Notebook) -> None:
    report = judge(reference, name="small (2).ipynb")
    assert report.status == "GRADED_WARN"
    assert points(report) == FULL


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("{", "damaged"),
        ("[" * 10**5, "nested too deep"),
        ("[]", "not a notebook"),
        ('{"cells": 3}', "not a notebook"),
        ('{"worksheets": [], "nbformat": 3}', "format 3"),
    ],
)
def test_19_an_invalid_notebook_has_a_reason(judge: Judge, text: str, reason: str) -> None:
    report = judge(text)
    assert report.status.startswith("INVALID(")
    assert {check.message for question in report.questions.values() for check in question.checks} == {
        "the notebook cannot be read"
    }
    assert reason in report.status
    assert report.points == 0
    assert points(report).keys() == FULL.keys()


def test_20_an_answer_that_is_no_finite_number(judge: Judge, reference: Notebook) -> None:
    report = judge(
        answer(reference, scale="def absmax_scale(x):\n    return torch.full((len(x),), float('nan'))")
    )
    assert report.questions["scale"].points == 2  # shape and dtype are right
    assert 0 <= report.points <= report.maximum


def test_22_a_link_is_not_followed(small: LabSource, zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "small.ipynb").symlink_to("/etc/passwd")
    assert judge_notebook(tmp_path / "small.ipynb", small, "s", zygote).status == "INVALID(symlink)"


def test_no_submission(small: LabSource, zygote: Zygote, tmp_path: Path) -> None:
    assert judge_notebook(tmp_path / "small.ipynb", small, "s", zygote).status.startswith(
        "INVALID(there is no notebook"
    )


RANK = (
    "def all_reduce_mean(x):\n    total = x.clone()\n    dist.all_reduce(total)\n    rank = dist.get_rank()\n"
    "    "
)


def test_24_every_rank_must_be_right(judge: Judge, reference: Notebook) -> None:
    report = judge(answer(reference, mean=RANK + "return total / dist.get_world_size() if rank == 0 else x"))
    assert points(report) == FULL | {"mean": 0.0}
    assert "rank 1" in messages(report, "mean")


def test_a_rank_that_raises_is_named_while_the_others_wait(judge: Judge, reference: Notebook) -> None:
    report = judge(
        answer(
            reference,
            mean=RANK + "\n    if rank == 1: raise ValueError('no')\n    dist.barrier()\n    return total",
        )
    )
    assert report.questions["mean"].points == 0
    assert "rank 1: your code raised ValueError: no (line 6 of cell `mean`" in messages(report, "mean")


def test_a_rank_that_dies_is_named(judge: Judge, reference: Notebook) -> None:
    report = judge(
        answer(reference, mean=RANK + "\n    import os\n    if rank == 1: os._exit(7)\n    dist.barrier()")
    )
    assert report.questions["mean"].status == "KERNEL_DIED"
    assert "rank 1: the process ended by itself (exit code 7)" in messages(report, "mean")


def test_23_a_rank_that_waits_forever(judge: Judge, reference: Notebook) -> None:
    report = judge(
        answer(
            reference,
            mean="def all_reduce_mean(x):\n    if dist.get_rank() == 0: dist.barrier()\n    return x",
        )
    )
    assert report.questions["mean"].points == 0
    assert "DEADLOCK: rank 0 waits" in messages(report, "mean")
    assert "cell `mean`, line 2: if dist.get_rank() == 0: dist.barrier()" in messages(report, "mean")


def test_23_a_rank_that_computes_forever(judge: Judge, reference: Notebook, monkeypatch: Patch) -> None:
    hurry(monkeypatch, 1.0)
    for_ever = "\n    while rank == 1: pass\n    dist.barrier()\n    return total / dist.get_world_size()"
    report = judge(answer(reference, mean=RANK + for_ever))
    assert report.questions["mean"].status == "TIMEOUT"
    assert "no answer in time from rank 1: rank 0 waits in barrier" in messages(report, "mean")


def test_25_modules_that_the_lab_teaches_are_blocked(judge: Judge, reference: Notebook) -> None:
    taught = "from dlo_lib.optim.step import train_step\ndef absmax_scale(x):\n    return train_step(x)"
    report = judge(answer(reference, scale=taught))
    assert report.questions["scale"].points == 0
    assert "dlo_lib.optim.step.train_step is what this lab teaches" in messages(report, "scale")


FORGED = """
import gc, json, socket
from dlo_lib.grading.sandbox.channel import Channel
from dlo_lib.grading.checks import codec
def absmax_scale(x):
    channel = next(thing for thing in gc.get_objects() if isinstance(thing, Channel))
    {forge}
"""


@pytest.mark.parametrize(
    "forge",
    [
        'channel.send({"id": 1, "value": x.float().abs().amax(1) / 127}); return None',
        'channel.line.sendall(b"\\0" * 7); import os; os._exit(0)',
        "channel.line.sendall(codec.HEAD.pack(1 << 60, 0)); return None",
        'channel.line.sendall(codec.HEAD.pack(1, 0) + b"{"); return None',
        'while True: channel.send({"cell": "x"})',
        'channel.send([["$tensor"]]); channel.send({"id": True}); return 1',
    ],
)
def test_23c_forged_messages_earn_nothing_and_do_no_harm(
    judge: Judge,
    reference: Notebook,
    forge: str,
) -> None:
    report = judge(answer(reference, scale=FORGED.format(forge=forge)))
    assert points(report) == FULL | {"scale": 0.0}


def test_hidden_checks_publish_only_their_authors_words(judge: Judge, reference: Notebook) -> None:
    """The inputs of a hidden check must not reach the student inside an exception."""
    report = judge(
        answer(reference, scale="def absmax_scale(x):\n    raise ValueError(f'the input was {x.shape}')")
    )
    shown = {check.name: check.published for check in report.questions["scale"].checks}
    assert "the input was" in shown["check_largest"]
    assert "the input was" not in shown["check_scale_dtype"]


TELLING = """
import gc, os
from dlo_lib.grading.sandbox.channel import Channel
def absmax_scale(x):
    told = f"the input was {{x.dtype}}"
    channel = next(thing for thing in gc.get_objects() if isinstance(thing, Channel))
    channel.send({{"cell": told}})
    {tell}
"""


@pytest.mark.parametrize("tell", ["raise MemoryError(told)", "os._exit(x.shape[1])"])
def test_the_end_of_a_process_reveals_no_input_of_a_hidden_check(
    judge: Judge,
    reference: Notebook,
    tell: str,
) -> None:
    report = judge(answer(reference, scale=TELLING.format(tell=tell)))
    shown = {check.name: check.published for check in report.questions["scale"].checks}
    assert shown["check_scale_dtype"] in ("out of memory", "the process ended by itself")
    assert "the input was" not in shown["check_scale_dtype"] + report.status
    assert report.questions["scale"].points == 0


# -- mutants, and a student's notebook without solutions


def test_a_mutant_is_judged_on_its_question_alone(small: LabSource, zygote: Zygote) -> None:
    for mutant in read_mutants(small.folder):
        planted = mutant.planted(small)
        question = judge_answer(small, planted.question, planted.answer, zygote)
        assert question.question == planted.question
        (lost,) = [check for check in question.checks if check.status != "OK"]
        assert lost.name == mutant.fails
        assert question.maximum - question.points == lost.maximum > 0


def test_a_students_own_copy_needs_no_solutions(
    reference: Notebook, small: LabSource, tmp_path: Path, monkeypatch: Patch
) -> None:
    shutil.copytree(small.folder.parents[1], tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("DLO_COURSE", str(tmp_path))
    release_lab(small.info)
    shutil.rmtree(tmp_path / "solutions")
    own = tmp_path / "my copy.ipynb"
    own.write_text(
        json.dumps(answer(reference, scale="def absmax_scale(x):\n    raise NotImplementedError  # later"))
    )
    report = visible_report(own)
    assert points(report) == {"scale": 0.0, "quantise": 0.0, "mean": 1.0, "quiz": 1.0}
    assert (
        messages(report, "scale") == "`absmax_scale` is not written yet | `absmax_scale` is not written yet"
    )

"""What students read carries nothing that only the judge knows: the course's solutions, the inputs of hidden
checks, files of the grader's machine.

Each test hands in a function that collects such a secret and puts it where a text of a report might carry it.
The needles are names in the bytecode of the reference of `scale`, and the dtype of the only hidden input with
that dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dlo_lib.grading.checks.contract import Check, Trial, Wrong
from dlo_lib.grading.checks.outcome import Outcome, Status
from dlo_lib.grading.judge.judge import Judge as JudgeOf
from dlo_lib.grading.judge.judge import reference_submission
from dlo_lib.grading.judge.report import Report, check_report, student_view
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.sandbox.host import Zygote

Judge = Callable[..., Report]
Notebook = dict[str, Any]

NOT_WRITTEN = "def absmax_scale(x):\n    raise NotImplementedError"
REFERENCE = "float_abs_amax"  # the names in the bytecode of the reference of `scale`
HIDDEN_INPUT = "bfloat16"  # only the hidden check of `scale` draws this dtype


def with_answers(notebook: Notebook, **answers: str) -> Notebook:
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], cell["source"])
    return notebook


def shown(report: Report) -> str:
    """Return everything that a student may read of a report."""
    return json.dumps(student_view(report))


def kept(report: Report) -> str:
    """Return the messages for the instructor."""
    return " ".join(check.message for question in report.questions.values() for check in question.checks)


# -- the reference of a needed step

STEAL = """
import inspect, linecache, os, sys, traceback
def secret():
    code = absmax_scale.__code__
    if "raise NotImplementedError" in "".join(linecache.getlines(code.co_filename)):
        raise NotImplementedError  # all cells together: the step is the student's own
    try:
        absmax_scale(None)  # the names also stand in the frames of its exception
    except AttributeError:
        frame = sys.exc_info()[2].tb_next.tb_frame
        return "_".join(frame.f_code.co_names)
def quantise(x):
    told = secret()
    {tell}
"""
TELL = {
    "the message of an exception": "raise ValueError(told)",
    "the type of an exception": "raise type(told, (Exception,), {})",
    "the type of an exception, its name changed later":
        "kind = type('E', (Exception,), {}); kind.__name__ = told; raise kind",
    "a returned value": "return told",
    "a value in a tuple": "return [told, told], told",
    "the type of a returned object": "return type(told, (), {})()",
    "the key of a dict": "return {type(told, (), {})(): 1}",
    "a shape": "return torch.empty((0, *map(ord, told[:5]))), torch.ones(len(x))",
    "out of memory": "raise MemoryError(told)",
    "too many processes": "raise BlockingIOError(11, told)",
    "a line that is not in the cell":
        "linecache.cache['<cell quantise>'] = (9, None, [told + '\\n'] * 99, '<cell quantise>'); 1 / 0",
    "the name of a cell": "exec(compile('1 / 0', f'<cell {told}>', 'exec'))",
}  # fmt: skip


@pytest.mark.parametrize("way", TELL)
def test_no_report_carries_the_reference_of_a_needed_step(
    judge: Judge, reference: Notebook, way: str
) -> None:
    stealing = STEAL.replace("{tell}", TELL[way])
    report = judge(with_answers(reference, scale=NOT_WRITTEN, quantise=stealing))
    assert report.questions["quantise"].points == 0
    needle = "102, 108, 111" if way == "a shape" else REFERENCE
    assert needle in kept(report), "nothing was stolen"
    assert needle not in shown(report)


def test_beside_the_reference_the_student_reads_the_type_and_the_own_line(
    judge: Judge, reference: Notebook
) -> None:
    mine = "def quantise(x):\n    scale = absmax_scale(x)\n    return scale[7000]"
    report = judge(with_answers(reference, scale=NOT_WRITTEN, quantise=mine))
    visible = report.questions["quantise"].checks[0]
    assert not visible.hidden
    assert (
        visible.published == "your code raised IndexError (line 3 of cell `quantise`: `return scale[7000]`)"
    )


def test_beside_the_reference_a_wrong_value_gets_the_authors_words(judge: Judge, reference: Notebook) -> None:
    mine = (
        "def quantise(x):\n    scale = absmax_scale(x)\n"
        "    return torch.floor(x / scale[:, None] + 2).to(torch.int8), scale"
    )
    report = judge(with_answers(reference, scale=NOT_WRITTEN, quantise=mine))
    visible = report.questions["quantise"].checks[0]
    assert visible.published == "q * scale is up to … away from x: more than half a step"


def test_without_the_reference_a_visible_check_says_all(judge: Judge, reference: Notebook) -> None:
    report = judge(with_answers(reference, quantise="def quantise(x):\n    raise ValueError(len(x.shape))"))
    assert "your code raised ValueError: 2 (line 2" in report.questions["quantise"].checks[0].published


# -- the inputs of hidden checks

REMEMBER = """
import builtins, os, torch
def remembered():
    found = [*getattr(builtins, "seen", [])]
    for file in ("/tmp/{file}", "{file}"):
        if os.path.exists(file):
            found.append(open(file).read())
    return " ".join(found)
def remember(x):
    told = str(x.dtype)
    if "bfloat16" in told:
        builtins.seen = [*getattr(builtins, "seen", []), told]
        for file in ("/tmp/{file}", "{file}"):
            open(file, "a").write(told)
def absmax_scale(x):
    remember(x)
    {scale}
def quantise(x):
    raise ValueError("seen: " + remembered())
"""


@pytest.mark.parametrize(
    "scale", ["return x.float().abs().amax(dim=1) / 127", "raise ValueError(remembered())", "os._exit(1)"]
)
def test_no_visible_check_tells_the_input_of_a_hidden_one(
    judge: Judge, reference: Notebook, scale: str
) -> None:
    file = f"seen-{uuid4().hex}"  # without a sandbox, /tmp is that of this machine
    mine = REMEMBER.replace("{file}", file).replace("{scale}", scale)
    try:
        report = judge(with_answers(reference, scale=mine, quantise=""))
    finally:
        Path("/tmp", file).unlink(missing_ok=True)
    assert "seen: " in shown(report)
    assert HIDDEN_INPUT not in shown(report)


HIDDEN_TELL = {
    "an exception": "raise ValueError(told)",
    "a type": "raise type(told, (Exception,), {})",
    "a value": "return told",
    "a value of a list": "return [told]",
    "the type of an object": "return type(told, (), {})()",
    "a shape": "return torch.empty((0, *map(ord, told[6:10])))",
    "a dtype": "return torch.ones(len(x), dtype=x.dtype)",
    "not written": "raise NotImplementedError(told)",
    "memory": "raise MemoryError(told)",
}


@pytest.mark.parametrize("way", HIDDEN_TELL)
def test_a_hidden_check_publishes_no_input(judge: Judge, reference: Notebook, way: str) -> None:
    mine = f"def absmax_scale(x):\n    told = str(x.dtype)\n    {HIDDEN_TELL[way]}"
    report = judge(with_answers(reference, scale=mine))
    (hidden,) = [check for check in report.questions["scale"].checks if check.hidden]
    assert hidden.points == 0
    # The title and the words of the author may name the dtype; what the function says may not.
    assert "torch.bfloat16" in hidden.message or "98, 102" in hidden.message or way == "memory"
    assert "torch.bfloat16" not in hidden.published
    assert "98, 102" not in hidden.published


def test_hidden_checks_run_after_the_visible_checks_of_all_questions(
    small: LabSource, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, order = load_checks(small.given, small.folder), []

    def run(check: Check, *_: object) -> Outcome:
        order.append(check)
        return Outcome(check, Status.WRONG)

    monkeypatch.setattr("dlo_lib.grading.judge.judge.run_check", run)
    judge, submission = JudgeOf(small, checks, "secret", zygote), reference_submission(small)
    judge.judge_together(submission)
    assert order == [*checks.visible, *checks.hidden]
    order.clear()
    late = {check.name: Outcome(check, Status.TIMEOUT) for check in checks.visible}
    judge.judge_alone("scale", submission, late)
    assert [check in checks.hidden for check in order] == [False, False, True]


# -- files of the grader's machine, and lines of other cells

FORGE = """
from dlo_lib.comm.calls import CallSite
from dlo_lib.grading.switch import link
def all_reduce_mean(x):
    link.call_site = lambda *_: (CallSite({file!r}, {line}, "mean", ""), "")
    link._shown = str
    {call}
"""


@pytest.mark.parametrize(
    "call",
    [
        "dist.barrier() if dist.get_rank() else None; return x",
        "dist.all_reduce(x[dist.get_rank():]); return x",
        "dist.barrier() if dist.get_rank() else os._exit(0)",
    ],
)
def test_the_judge_reads_no_file_for_a_message(
    judge: Judge, reference: Notebook, small: LabSource, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small.folder / "hidden.py"
    lines = file.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "ANSWERS = {" in text)
    monkeypatch.syspath_prepend(str(file.parent))  # a relative name is searched there
    for name in (str(file), file.name):
        forged = "import os, torch" + FORGE.format(file=name, line=line, call=call)
        report = judge(with_answers(reference, mean=forged))
        assert report.questions["mean"].points < 2
        assert "ANSWERS = {" not in shown(report) + kept(report)


def test_no_message_shows_a_line_of_another_cell(
    judge: Judge, small: LabSource, reference: Notebook, zygote: Zygote
) -> None:
    """The judging service has judged the reference; its judges inherit the lines of its cells."""
    whole = JudgeOf(small, load_checks(small.given, small.folder), "secret", zygote)
    assert whole.judge(reference_submission(small)).points == small.points
    deadlock = "dist.barrier() if dist.get_rank() else None; return x"
    forged = FORGE.format(file="<cell scale>", line=4, call=deadlock)
    report = judge(with_answers(reference, scale=NOT_WRITTEN, mean="import os, torch" + forged))
    assert "amax" not in shown(report)


# -- the author's words


def fails(compare: Callable[[Trial], object]) -> Wrong:
    with pytest.raises(Wrong) as wrong:
        compare(Trial(0))
    return wrong.value


@pytest.mark.parametrize(
    ("compare", "words"),
    [
        (lambda t: t.equal(1, 2, "f({size})", size=7), "f(…) is not right"),
        (lambda t: t.close(1.0, 2.0, "f({size}) of {part}", size=7, part="x"), "f(…) of … is not right"),
        (lambda t: t.number("7", "f({size:.3g})", size=7), "f(…) is not right"),
        (lambda t: t.items(7, 2, "the pair"), "the pair is not right"),
        (lambda t: t.that(False, "a dict {}"), "a dict {}"),
    ],
)  # fmt: skip
def test_the_authors_words_hold_no_value(compare: Callable[[Trial], object], words: str) -> None:
    assert fails(compare).words == fails(compare).brief == words


def test_a_message_that_was_formatted_is_no_words() -> None:
    got = "told by the student's process"
    for wrong in (
        fails(lambda t: t.that(False, f"it is {got}")),
        fails(lambda t: t.that(False, "it is " + got)),
        fails(lambda t: t.that(False, f"rank {{rank}} is {got}", rank=1)),
        fails(lambda t: t.equal(1, 2, f"the {got}")),
        fails(lambda t: t.equal(1, 2, f"the {got} of {{rank}}", rank=1)),
    ):
        assert got in str(wrong)
        assert {wrong.words, wrong.brief} <= {"", "a result is not right"}


LESSONS = {"one": ("Send each tensor once.", 1)}


def test_a_message_from_the_constants_of_a_module_is_its_authors() -> None:
    lesson = LESSONS["one"][0]
    assert fails(lambda t: t.that(False, lesson)).words == LESSONS["one"][0]


def test_a_message_with_values_is_no_words_for_a_hidden_check() -> None:
    """Its author may rely on that: the words around the values may name an input."""
    wrong = fails(lambda t: t.that(False, "rank {rank} has {{{got}}}", rank=7, got=7))
    assert (str(wrong), wrong.words, wrong.brief) == ("rank 7 has {7}", "", "rank … has {…}")


def test_an_error_of_the_grader_shows_the_student_only_the_authors_words(small: LabSource) -> None:
    check = load_checks(small.given, small.folder).visible[0]
    report = check_report(Outcome(check, Status.GRADER_ERROR, "KeyError: 'secret'", "tell them"), False)
    assert (report.message, report.published) == ("KeyError: 'secret'", "tell them")

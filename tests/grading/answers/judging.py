"""Judge answers, and print the table of their points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dlo_lib.grading.judge.judge import Judge, judge_answer, reference_submission, zygote_for
from dlo_lib.grading.judge.report import QuestionReport
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.sandbox.host import Zygote
from tests.grading.answers import ROOT, Answer

SECRET = "mutants"  # any value: an answer earns the same with each class secret


class OpenLabs:
    """The labs and their zygotes, each started when its first answer is judged; the last one is kept."""

    def __init__(self) -> None:
        self._lab: LabSource | None = None
        self._zygote: Zygote | None = None

    def lab(self, name: str) -> LabSource:
        """Return the lab of this folder."""
        if self._lab is None or self._lab.info.directory != name:
            self.close()
            self._lab = read_lab(ROOT / "solutions" / name)
            self._zygote = zygote_for(self._lab)
        return self._lab

    def zygote(self, name: str) -> Zygote:
        """Return the zygote of the lab of this folder."""
        self.lab(name)
        assert self._zygote is not None
        return self._zygote

    def close(self) -> None:
        """End the zygote."""
        if self._zygote is not None:
            self._zygote.close()
        self._lab = self._zygote = None


def judged(answer: Answer, lab: LabSource, zygote: Zygote, secret: str = SECRET) -> QuestionReport:
    """Judge ``answer`` alone, with the reference solutions of the other steps."""
    return judge_answer(lab, answer.question, answer.source(lab), zygote, secret)


def judged_together(
    answers: Iterable[Answer], lab: LabSource, zygote: Zygote, secret: str = SECRET
) -> Mapping[str, QuestionReport]:
    """Judge answers to different questions as one submission, which costs a process for all of them."""
    texts = {answer.question: answer.source(lab) for answer in answers}
    judge = Judge(lab, load_checks(lab.given, lab.folder), secret, zygote)
    return judge.judge(reference_submission(lab, texts)).questions


def lost(report: QuestionReport) -> list[str]:
    """Return the checks that a report does not pass, with their messages, one line each."""
    return [f"{check.name}: {check.status}: {check.message}" for check in report.checks if not check.points]


def table(labs: OpenLabs, answers: Iterable[Answer]) -> Iterator[tuple[str, bool]]:
    """Judge ``answers``; yield a line for each, with the checks that it passes or loses if its points are
    unexpected, and whether they are expected."""
    for answer in answers:
        lab, zygote = labs.lab(answer.lab), labs.zygote(answer.lab)
        report = judged(answer, lab, zygote)
        good = answer.as_expected(report.points, lab)
        must = answer.earns if isinstance(answer.earns, str) else f"{answer.most(lab):g}"
        points = f"{report.points:g} / {must} / {lab.test(answer.question).points:g}"
        line = (
            f"{answer.lab[:2]}  {answer.kind.value:7}  {answer.question:14}  {answer.title:48}  {points:14}"
        )
        line = f"{line}  {answer.does}"
        if not good:
            passed = [f"{check.name} passes" for check in report.checks if check.points]
            line = "\n        ".join([f"{line}  UNEXPECTED", *passed, *lost(report)])
        yield line, good

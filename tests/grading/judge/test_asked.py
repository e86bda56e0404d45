"""Functions of a check that the student's code calls, scenarios in fresh processes, and claimed values: the
same in a notebook and under the judge."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.checks.asked import Asked
from dlo_lib.grading.checks.claimed import Claimed, ClaimScored
from dlo_lib.grading.checks.codec import NotPlain
from dlo_lib.grading.checks.contract import Kind, Nudge, Student, Wrong, check, claimed, scenario
from dlo_lib.grading.checks.outcome import Status, run_check
from dlo_lib.grading.checks.trial import Trial
from dlo_lib.grading.judge.attempt import Attempt, RemoteStudent
from dlo_lib.grading.judge.cells import Origin, SubmissionCell
from dlo_lib.grading.judge.unused_messages import AnswerRecorder, ReplayedStudent
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.grading.sandbox.host import Zygote

CELL = """import torch
kept = []
def largest(fits, limit):
    kept.append(fits)
    size = 1
    while 2 * size <= limit and fits(2 * size): size *= 2
    return size
def stubborn(fits):
    for _ in range(10_000):
        try: fits(1)
        except BaseException: pass
    return 7
def polite(fits):
    try: return [fits(batch) for batch in range(100)]
    except Exception: return "continued"
def late(): return kept[-1](1)
def tried(run):
    try: return run(3)
    except torch.OutOfMemoryError as error: return str(error)
def given(f, value): return f(value)
def sends_an_object(f): return f(object())
def grown(f, value):
    for _ in range(3): value = f(value, value.sum())
    return value
def rows(ask): return ask(torch.arange(3), scale=2.0)
def threads(f):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(3) as pool: return sorted(pool.map(f, range(9)))
def with_thread(f, work):
    from threading import Thread
    asking = Thread(target=lambda: [f(1) for _ in range(5)])
    asking.start()
    work()
    asking.join()
state = {}
def save(value): state["value"] = value; return len(state)
def load(): return state.get("value", "nothing")
def fails(): raise ValueError("no state")
"""


def judged(zygote: Zygote, cell: str = CELL) -> Iterator[Student]:
    attempt = Attempt(zygote, [SubmissionCell("question", Origin.ANSWER, cell)], seconds=30)
    yield RemoteStudent(attempt, "question", seconds=30)
    attempt.close()


@pytest.fixture(params=["notebook", "judge"])
def student(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[Student]:
    if request.param == "judge":
        yield from judged(zygote)
        return
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<cell question>", "exec"), names)
    yield LocalStudent(names)  # noqa: PT022  the other student needs its end


def said(run: Callable[[], object]) -> str:
    with pytest.raises(Wrong) as error:
        run()
    return str(error.value)


def test_the_check_answers_each_call_and_counts(student: Student) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 40

    asked = Trial(0).asked(fits, calls=20)
    assert student.largest(asked, 1000) == 32
    assert tried == [2, 4, 8, 16, 32, 64]
    assert asked.count == 6


def test_tensors_keywords_and_threads_pass(student: Student) -> None:
    asked = Asked(lambda rows, scale: rows * scale, calls=1)
    assert torch.equal(student.rows(asked), torch.tensor([0.0, 2.0, 4.0]))
    assert student.threads(Asked(lambda number: number + 1, calls=9)) == list(range(1, 10))


def test_an_exception_that_is_named_reaches_the_students_code(student: Student) -> None:
    def run(batch: int) -> None:
        raise torch.OutOfMemoryError(f"no memory for {batch}")

    asked = Asked(run, calls=1, raises=[torch.OutOfMemoryError])
    assert student.tried(asked) == "no memory for 3"


@pytest.mark.parametrize("name", ["polite", "stubborn"])
def test_a_call_too_many_ends_the_check_whatever_the_code_does(student: Student, name: str) -> None:
    asked = Asked(lambda batch: batch, calls=5, too_many="the search does not end", name="fits")
    assert said(lambda: getattr(student, name)(asked)) == "the search does not end"
    assert asked.count == 5
    assert said(lambda: student.given(Asked(len, calls=1), 3)).startswith("`len` cannot take what")


def test_a_comparison_in_the_function_ends_the_check(student: Student) -> None:
    def refused(value: object) -> None:
        Trial(0).that(value == 2, "{value} was passed", value=value)

    assert said(lambda: student.given(Asked(refused, calls=9), 3)) == "3 was passed"


def test_an_error_of_the_check_is_not_the_students(student: Student) -> None:
    def broken(value: object) -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        student.given(Asked(broken, calls=1), 3)


def test_only_plain_data_is_passed(student: Student) -> None:
    asked = Asked(lambda value: value, calls=3)
    assert student.given(asked, {"a": (1, 2.5)}) == {"a": (1, 2.5)}
    assert "takes plain data, not an object of type" in said(lambda: student.sends_an_object(asked))
    with pytest.raises(TypeError, match="of the check returns an object of type"):
        student.given(Asked(lambda value: object(), calls=1), 1)


def test_a_stand_in_answers_only_during_its_call(zygote: Zygote) -> None:
    for student in judged(zygote):
        asked = Asked(lambda batch: batch <= 4, calls=9, name="fits")
        assert student.largest(asked, 100) == 4
        assert "fits answers only during the call to which it was passed" in said(student.late)
        assert asked.count == 3, "the late call has not come to the check"


def test_the_students_process_holds_neither_the_function_nor_what_it_knows(zygote: Zygote) -> None:
    """The closure of the stand-in leads to the channel, and to no number of the check."""
    spy = """import gc, types
def largest(fits, limit):
    numbers, seen, left = [], set(), [fits]
    while left:
        each = left.pop()
        if id(each) in seen or len(seen) > 20_000 or isinstance(each, (types.ModuleType, type)): continue
        seen.add(id(each))
        if type(each) is int: numbers.append(each)
        elif type(each) is not dict or "__builtins__" not in each: left += gc.get_referents(each)
    return 987654321 in numbers
"""
    secret = 987654321
    for student in judged(zygote, spy):
        assert student.largest(Asked(lambda batch: batch <= secret, calls=9), 100) is False


def test_a_long_call_that_no_function_expects_is_not_decoded(zygote: Zygote) -> None:
    for student in judged(zygote):
        assert student.given(Asked(len, calls=1), "x" * 100_000) == 100_000
        assert "takes at most" in said(partial(student.given, Asked(len, calls=1), "x" * (1 << 20)))


@scenario
def kept_state(student, value):
    return student.save(value)


@scenario
def loaded_state(student):
    return student.load()


@scenario
def failing(student):
    return student.fails()


def test_a_global_does_not_survive_a_fresh_process(student: Student) -> None:
    assert student.fresh(kept_state, value=3) == 1
    assert student.fresh(loaded_state) == "nothing"
    assert student.load() == "nothing"
    assert re.search("ValueError: no state .*line 38", said(lambda: student.fresh(failing)))


@scenario
def counted(student, limit):
    seen = []

    def fits(size):
        seen.append(size)
        return size <= limit

    return [student.largest(fits, 100), claimed(len(seen))]


def test_a_claim_can_be_shown_and_not_scored(student: Student) -> None:
    t = Trial(0)
    got, tries = t.items(student.run(counted, limit=8), 2, "the result")
    assert got == 8
    assert isinstance(tries, Claimed)
    assert said(lambda: t.that(False, "{tries} tries", tries=tries)) == "4 tries"
    for scored in (
        lambda: t.that(tries, "tries"),
        lambda: t.that(tries == 4, "tries"),
        lambda: t.that(tries <= 4, "tries"),
        lambda: t.equal([tries], [4], "tries"),
        lambda: t.close(tries, 4.0, "tries"),
        lambda: t.number(tries, "tries"),
        lambda: t.tensor(tries, "tries"),
        lambda: t.items(tries, 4, "tries"),
        lambda: len(tries),
        lambda: tries + 1,
    ):
        with pytest.raises(ClaimScored):
            scored()


def test_a_check_that_scores_a_claim_is_an_error_of_ours(student: Student) -> None:
    @check("largest", points=1)
    def check_tries(student, t):
        _, tries = student.run(counted, limit=8)
        t.that(tries <= 4, "too many tries")

    outcome = run_check(check_tries, student, 0)
    assert outcome.status is Status.GRADER_ERROR
    assert "TypeError" in outcome.message


def test_a_student_cannot_mark_a_value_where_a_scenario_does_not(student: Student) -> None:
    @scenario
    def given(student):
        from dlo_lib.grading.checks.claimed import Claimed

        return Claimed(student.save(1))

    with pytest.raises((NotPlain, Wrong)):
        student.run(given)


@scenario
def summed_answers(student, rank, world, ask, value):
    answer = student.grown(ask, value)
    dist.all_reduce(answer)
    return answer


@scenario
def beside_collectives(student, rank, world, ask):
    numbers = torch.ones(4)

    def work():
        for _ in range(5):
            dist.all_reduce(numbers)

    student.with_thread(ask, work)
    return numbers


@scenario
def passed(student, rank, world, ask, value):
    return student.given(ask, value)


@scenario
def insisting(student, rank, world, ask):
    return student.stubborn(ask)


@scenario
def waiting_for_one(student, rank, world, ask):
    if rank == 0:
        student.stubborn(ask)
    dist.all_reduce(torch.ones(2))


@scenario
def tries(student, rank, world, ask):
    return student.tried(ask)


def each_rank(ask: list[Asked], **inputs: Any) -> list[dict[str, Any]]:
    return [{"ask": each, **inputs} for each in ask]


def test_each_rank_asks_and_the_check_knows_which_one(student: Student) -> None:
    heard: list[list[float]] = [[], []]

    def of(rank: int) -> Asked:
        def grow(value: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            heard[rank].append(float(total))
            return value + rank + 1

        return Asked(grow, calls=3)

    asked = [of(0), of(1)]
    run = student.ranks(summed_answers, each_rank(asked, value=torch.zeros(2)))
    assert [got.tolist() for got in run.results] == [[9.0, 9.0], [9.0, 9.0]]
    assert heard == [[0, 2, 4], [0, 4, 8]]
    assert [each.count for each in asked] == [3, 3]
    assert [call.kind for call in run.calls(0)] == [Kind.ALL_REDUCE]

    nudged = run.repeat(Nudge(Kind.ALL_REDUCE, rank=1, by=0.5))  # beyond the three calls of each
    assert nudged.results[1].tolist() == [9.5, 9.0]
    assert heard == [[0, 2, 4] * 2, [0, 4, 8] * 2]
    assert [each.count for each in asked] == [3, 3]


def test_one_function_counts_the_calls_of_all_ranks(student: Student) -> None:
    asked = Asked(lambda number: 2 * number, calls=20, name="double")
    run = student.ranks(beside_collectives, each_rank([asked] * 3))
    assert asked.count == 15
    assert all(got.tolist() == [3.0**5] * 4 for got in run.results)


@pytest.mark.parametrize("on_ranks", [insisting, waiting_for_one], ids=lambda each: each.name)
def test_a_refused_call_ends_the_run_whatever_the_ranks_do(student: Student, on_ranks: Any) -> None:
    asked = Asked(lambda number: number, calls=4, too_many="{name} was asked {calls} times", name="f")
    assert said(lambda: student.ranks(on_ranks, each_rank([asked] * 2))) == "f was asked 4 times"
    assert asked.count == 4


def test_what_the_function_does_not_take_ends_the_run(student: Student) -> None:
    def refused(value: object) -> None:
        Trial(0).that(value == 2, "{value} was passed", value=value)

    def broken(value: object) -> None:
        raise OSError("no such file")

    def on_a_rank(function: Callable[..., Any], value: object) -> Any:
        return student.ranks(passed, [{"ask": Asked(function, calls=9), "value": value}])

    assert said(lambda: on_a_rank(refused, 3)) == "3 was passed"
    assert said(lambda: on_a_rank(len, 3)).startswith("`len` cannot take what")
    assert "takes at most" in said(lambda: on_a_rank(len, torch.zeros(1 << 18)))
    with pytest.raises(OSError, match="no such file"):
        on_a_rank(broken, 3)
    with pytest.raises(TypeError, match="of the check returns an object of type"):
        on_a_rank(lambda value: object(), 3)


def test_an_exception_that_is_named_reaches_the_code_of_a_rank(student: Student) -> None:
    def run(batch: int) -> None:
        raise torch.OutOfMemoryError(f"no memory for {batch}")

    asked = Asked(run, calls=2, raises=[torch.OutOfMemoryError])
    assert student.ranks(tries, each_rank([asked] * 2)).results == ["no memory for 3"] * 2


def test_a_replay_repeats_the_calls_of_the_functions(zygote: Zygote) -> None:
    """A check that compares what a function of it received must not fail only because no rank runs."""

    @check("grown", points=1)
    def check_received(student, t):
        received = []

        def grow(value, total):
            received.append(float(total))
            return value + 1

        asked = t.asked(grow, calls=6)
        run = student.ranks(summed_answers, each_rank([asked] * 2, value=torch.zeros(2)))
        t.equal(sorted(received), [0.0, 0.0, 2.0, 2.0, 4.0, 4.0], "what grow received")
        t.equal(run.results[0].tolist(), [6.0, 6.0], "the result")

    for student in judged(zygote):
        recorder = AnswerRecorder(student)
        assert run_check(check_received, recorder, 0).passed
        assert recorder.receives
        assert run_check(check_received, ReplayedStudent(recorder.answers), 0).passed


@scenario
def fresh_largest(student, ask):
    return student.largest(ask, 100)


def test_a_fresh_process_asks_too(student: Student) -> None:
    asked = Asked(lambda batch: batch <= 9, calls=20)
    assert student.fresh(fresh_largest, ask=asked) == 8
    assert asked.count == 4
    few = Asked(lambda batch: True, calls=2, name="fits")
    assert said(lambda: student.fresh(fresh_largest, ask=few)) == "`fits` was called more than 2 times"

"""A drawn trace is nested and sorted, and the drawn bottleneck takes most of the time that is lost."""

from __future__ import annotations

import pytest

from dlo_lib.grading.checks.trial import Trial
from dlo_lib.labkit import drawn_programs
from dlo_lib.labkit.drawn_programs import CAUSES, LOADER, MAIN, Span, program
from dlo_lib.profiling import TraceEvent, self_times


def lost(spans: list[Span]) -> tuple[dict[str, float], float]:
    """The ms of each cause within the steps, and the ms of the steps; by the spans around each span."""
    main = [span for span in spans if span["track"] == MAIN]
    events = [
        TraceEvent(span["name"], "", span["begin"], span["end"] - span["begin"], ("0", "0")) for span in main
    ]
    found, total, of_forward = dict.fromkeys([*CAUSES, "work"], 0.0), 0.0, set()
    around: list[Span] = []
    for span, own in zip(main, self_times(events)):
        around = [outer for outer in around if outer["end"] > span["begin"]] + [span]
        names = [each["name"] for each in around]
        if not names[0].startswith("ProfilerStep"):
            continue
        total += (span["end"] - span["begin"]) if len(around) == 1 else 0.0
        key = span["name"], span["dtype"], str(span["shapes"])
        operator = span["name"].startswith("aten::")
        if "forward" in names and operator:
            of_forward.add(key)
        cases = {
            "read": "aten::item" in names,
            "copy": "aten::to" in names,
            "float64": span["dtype"] == "float64",
            "repeated": operator and "forward" not in names and key in of_forward,
            "small": operator and span["end"] - span["begin"] < 0.05,
            "loader": "load" in names and not operator,
        }
        found[next((cause for cause, fits in cases.items() if fits), "work")] += own
    del found["work"]
    return found, total


def largest(found: dict[str, float]) -> list[str]:
    """The causes, the one with most time first."""
    return sorted(found, key=lambda cause: -found[cause])


@pytest.mark.parametrize("cause", CAUSES)
def test_the_bottleneck_takes_most_time_and_the_second_fault_is_clearly_smaller(cause: str) -> None:
    for seed in range(3):
        t = Trial(seed)
        second = t.choice([other for other in CAUSES if other != cause])
        found, total = lost(program(t, cause, second, outside=True))
        assert largest(found)[:2] == [cause, second]
        assert found[cause] > 1.3 * found[second]
        assert found[second] > 0.2 * total  # so that an order of causes does not decide
        assert largest(lost(program(t, cause))[0])[0] == cause


def test_nothing_takes_a_tenth_of_a_healthy_program() -> None:
    found, total = lost(program(Trial(3), outside=True))
    assert max(found.values()) < 0.1 * total


def test_spans_are_sorted_and_nested_and_the_loader_has_a_track() -> None:
    spans = program(Trial(5), "copy", "read", outside=True)
    assert spans == sorted(spans, key=lambda span: (span["begin"], -span["end"]))
    assert {span["track"] for span in spans} == {MAIN, LOADER}
    for track in (MAIN, LOADER):
        around: list[Span] = []
        for span in (each for each in spans if each["track"] == track):
            around = [outer for outer in around if outer["end"] > span["begin"]]
            assert not around or span["end"] <= around[-1]["end"]
            around.append(span)


def test_a_login_has_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    for login in ("ada", "ada", "grace"):
        monkeypatch.setenv("JUPYTERHUB_USER", login)
        seeds.append(drawn_programs.seed_of_login())
    assert seeds[0] == seeds[1] != seeds[2]
    assert drawn_programs.unknown(seeds[0]) == drawn_programs.unknown(seeds[1])
    unknown = drawn_programs.unknown(seeds[0])
    assert largest(lost(unknown.spans)[0])[0] == unknown.bottleneck
    assert largest(lost(unknown.without)[0])[0] == unknown.second


def test_a_user_without_a_name_has_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed() -> str:
        raise KeyError("uid not found")

    monkeypatch.delenv("JUPYTERHUB_USER", raising=False)
    monkeypatch.setattr("getpass.getuser", unnamed)
    assert drawn_programs.seed_of_login() >= 0

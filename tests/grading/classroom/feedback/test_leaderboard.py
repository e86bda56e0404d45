"""The leaderboard: groups that the runs cannot distinguish, rows without a place, names, and a page that runs
nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.base.one_thread import one_torch_thread
from dlo_lib.base.provenance import Provenance, digest
from dlo_lib.grading.checks.outcome import seed_for
from dlo_lib.grading.checks.trial import Trial
from dlo_lib.grading.classroom.feedback.leaderboard import (
    Entry,
    entry_name,
    leaderboard_html,
    ranked,
    read_entry,
    with_references,
)
from dlo_lib.grading.judge.preprocessor import SECRET_FILE
from dlo_lib.grading.judge.report import GRADED, CheckReport, QuestionReport, Report
from dlo_lib.grading.lab.course import find_lab, given_folder, source_folder, source_labs
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.labkit import race
from dlo_lib.labkit.race_board import reference_rows

WHOLE = {"commit": "a" * 40, "seed": 3, "config": {"batch": 16}, "data": "0" * 64}
SEEDS = [0.02, -0.01, 0.00, 0.03, -0.04]
"""What the five seeds add to the score of every entry."""


def entry(name: str, mean: float, wobble: float = 0.0, **run) -> Entry:
    """An entry whose scores differ between seeds as all do, and by ``wobble`` as no other does."""
    own = [wobble, -wobble, wobble, -wobble, 0.0]
    scores = tuple(mean + seed + part for seed, part in zip(SEEDS, own, strict=True))
    return Entry(name, scores, 1e9, Provenance.read({**WHOLE, **run}))


def report(measured: dict) -> Report:
    plain = CheckReport("check_speed", "speed", 1.0, 1.0, "PASSED", "", "", False)
    check = CheckReport("check_race", "race", 1.0, 1.0, "PASSED", "", "", False, measured=measured)
    return Report("09_the_race", GRADED, {"race": QuestionReport("race", 2.0, 2.0, GRADED, (plain, check))})


def names(board) -> list[list[str]]:
    return [[one.name for one in group] for group in board.groups]


def test_entries_are_in_the_order_of_their_means():
    board = ranked([entry("low", 0.5), entry("high", 0.9), entry("middle", 0.7)])
    assert names(board) == [["high"], ["middle"], ["low"]]


def test_a_difference_within_the_wobble_of_the_runs_is_one_group():
    board = ranked([entry("a", 0.900), entry("b", 0.899, wobble=0.01), entry("c", 0.8)])
    assert names(board) == [["a", "b"], ["c"]]


def test_pairs_of_seeds_show_what_the_intervals_hide():
    better, worse = entry("better", 0.90), entry("worse", 0.89, wobble=0.001)
    assert better.interval.low < worse.interval.high, "the intervals overlap"
    assert names(ranked([worse, better])) == [["better"], ["worse"]]


def test_a_group_is_compared_with_its_first_entry():
    """b cannot be distinguished from a, nor c from b, but c can from a."""
    a, b, c = entry("a", 0.900), entry("b", 0.894, wobble=0.008), entry("c", 0.888, wobble=0.002)
    assert names(ranked([a, b, c])) == [["a", "b"], ["c"]]
    assert names(ranked([b, c])) == [["b", "c"]]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("commit", "the run has no commit"),
        ("seed", "the run has no seed"),
        ("config", "the run has no configuration"),
        ("data", "the run has no data hash"),
    ],
)
def test_an_entry_without_a_field_has_no_place_and_a_reason(field, said):
    board = ranked([entry("a", 0.9), entry("best", 0.99, **{field: None})], [("late", "it is not graded")])
    assert names(board) == [["a"]]
    assert board.outside == (("best", said), ("late", "it is not graded"))


def test_scores_of_other_seeds_are_not_compared():
    short = Entry("short", (0.99, 0.99), 1e9, Provenance.read(WHOLE))
    board = ranked([entry("a", 0.9), short])
    assert names(board) == [["a"]]
    assert board.outside == (("short", "it has 2 scores, others have 5: grade the lab again"),)


def test_one_seed_distinguishes_nothing():
    board = ranked(
        [Entry(name, (score,), None, Provenance.read(WHOLE)) for name, score in (("a", 0.9), ("b", 0.1))]
    )
    assert names(board) == [["a", "b"]]
    assert "inf" in leaderboard_html(find_lab("06", source_labs()), board)


def test_an_entry_is_what_the_report_measured():
    found = read_entry("ada", report({"scores": [0.5, 0.7], "flops": 2e9, "run": WHOLE}))
    assert found == Entry("ada", (0.5, 0.7), 2e9, Provenance.read(WHOLE))
    assert read_entry("ada", report({"scores": [0.5], "run": {}})).run.missing
    for nothing in ({}, {"scores": []}, {"scores": [float("nan")]}):
        assert read_entry("ada", report(nothing)) is None


def test_an_entry_s_name_depends_on_the_student_the_lab_and_the_secret(tmp_path: Path):
    lab = find_lab("06", source_labs())
    (tmp_path / SECRET_FILE).write_text("one")
    first = entry_name(tmp_path, lab, "ada")
    assert re.fullmatch(r"entry [0-9a-f]{6}", first)
    assert first == entry_name(tmp_path, lab, "ada") != entry_name(tmp_path, lab, "blaise")
    (tmp_path / SECRET_FILE).write_text("another")
    assert entry_name(tmp_path, lab, "ada") != first


def test_the_page_shows_intervals_groups_and_reasons_and_runs_nothing():
    lab = find_lab("06", source_labs())
    bad = entry("<script>alert(1)</script>", 0.95, seed=None)
    page = leaderboard_html(lab, ranked([entry("ada", 0.9), entry("bob", 0.899, wobble=0.01), bad]))
    assert page.count('<section class="card">') == 1
    assert page.count("not distinguishable") == 1
    found = entry("ada", 0.9).interval
    assert f"{found.low:.4f} – {found.high:.4f}" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;: the run has no seed" in page
    assert "<script" not in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_an_empty_class_has_a_page():
    assert "No entry has a place yet." in leaderboard_html(find_lab("06", source_labs()), ranked([]))


def test_references_are_marked_rows_in_no_group():
    board = ranked([entry("a", 0.9), entry("b", 0.6)])
    references = [entry("the baseline", 0.2), entry("the best", 0.95), entry("too few", 0.5)]
    few = Entry("too few", (0.5, 0.5), None, Provenance.read(WHOLE))
    other = entry("other images", 0.5, data="1" * 64)
    found = with_references(board, [*references[:2], few, other])
    assert names(found) == [["a"], ["b"]]
    assert [row.name for row in found.references] == ["the best", "the baseline"]
    reason = "it ran on other data than the entries: grade the lab again"
    assert found.outside == (("other images", reason), ("too few", reason))
    lab = find_lab("06", source_labs())
    page, plain = leaderboard_html(lab, found), leaderboard_html(lab, board)
    assert page.count(">reference</span>") == 2
    assert plain.count(">reference</span>") == 0
    low = references[0].interval
    assert f"{low.low:.4f} – {low.high:.4f}" in page
    assert page.count('<section class="card">') == plain.count('<section class="card">') + 1


def test_the_race_has_the_baseline_and_two_references_on_the_seeds_of_the_class():
    """The baseline's scores are those of a separate training on the seeds that the check draws."""
    lab = find_lab("09", source_labs())
    rows = reference_rows(lab, "a class", "check_very_good")
    assert [row.name for row in rows] == [
        "the baseline",
        "the baseline's model, the course's rule",
        "the course's entry",
    ]
    checks = load_checks(given_folder(source_folder(lab)))
    (check,) = (each for each in checks.visible if each.name == "check_very_good")
    draw = Trial(seed_for("a class", lab.directory, check))
    seeds = [(draw.integer(0, 2**60), draw.integer(0, 2**60)) for _ in rows[0].scores]
    steps = race.steps_of(race.BASELINE)
    with one_torch_thread():
        for score, (images, run) in zip(rows[0].scores, seeds, strict=True):
            data = race.images_of(images)
            model = race.trained(race.BASELINE, data, steps, run, race.BASELINE_RULES)
            assert score == race.accuracy(model, data)
    means = [row.interval.mean for row in rows]
    assert means == sorted(means)
    assert all(row.interval.low < row.interval.mean < row.interval.high for row in rows)
    assert {row.run.data for row in rows} == {digest(*_images(seeds[0][0]))}
    assert reference_rows(find_lab("06", source_labs()), "a class", "check_very_good") == []
    with pytest.raises(UserError, match="has no check check_fast: grade the lab again"):
        reference_rows(lab, "a class", "check_fast")


def _images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    train = race.images_of(seed).train
    return train.images, train.labels

"""The harness compares fairly: in turns, pair by pair, and its command knows its names."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from benchmarks.__main__ import names
from benchmarks.paired import Row, Spread, Turn, Turns, compare, measure, over_ranks, ratios, take_turns

ROOT = Path(__file__).parents[2]


def test_ours_and_the_peer_take_turns_in_an_order_that_swaps():
    seen: list[str] = []
    turns = take_turns(lambda: seen.append("A"), lambda: seen.append("B"), pairs=4, warm_up=1, between=lambda: seen.append("|"))
    assert "".join(seen) == "|A|B" + "|A|B|B|A|A|B|B|A"
    assert len(turns.ours) == len(turns.peer) == 4


def test_ratios_are_taken_within_pairs_so_that_a_drift_of_the_machine_cancels():
    assert ratios([1.0, 10.0, 100.0], [2.0, 20.0, 200.0]) == Spread(0.5, 0.5, 0.5, 3)


def test_the_peak_of_memory_is_that_of_the_turn_alone():
    first = measure(lambda: numpy.ones(32 << 20, dtype=numpy.uint8).sum())
    second = measure(lambda: numpy.ones(8 << 20, dtype=numpy.uint8).sum())
    assert first.memory == pytest.approx(32 << 20, rel=0.3)
    assert second.memory == pytest.approx(8 << 20, rel=0.3)


def test_cpu_time_is_not_wall_time():
    turn = measure(lambda: time.sleep(0.2))
    assert turn.wall >= 0.2 > 10 * turn.cpu


def test_a_jobs_turn_is_its_slowest_rank_all_its_cpu_and_its_largest_peak():
    fast, slow = Turns([Turn(1, 1, 10)], [Turn(2, 1, 1)]), Turns([Turn(3, 2, 5)], [Turn(1, 4, 2)])
    assert over_ranks([fast, slow]) == Turns([Turn(3, 3, 10)], [Turn(2, 5, 2)])


def test_a_row_says_ours_over_the_peers_and_over_the_floor():
    turns = Turns([Turn(1, 2, 3 << 20)] * 3, [Turn(2, 4, 6 << 20)] * 3)
    row = compare("ddp", "torch", 2, turns, floor_cpu=1.0)
    assert [ratio.median for ratio in (row.time_ratio, row.cpu_ratio, row.memory_ratio, row.floor_ratio)] == [0.5, 0.5, 0.5, 2.0]
    assert json.loads(json.dumps(row.as_json()))["time_ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5, "pairs": 3}
    assert Row("x", "y", 1).as_json()["memory_ratio"] is None


def test_each_comparison_is_a_module_and_the_harness_is_none():
    assert {"launch", "memory"} <= set(names())
    assert "paired" not in names()


def test_an_unknown_name_is_one_line_with_the_nearest():
    run = subprocess.run([sys.executable, "-m", "benchmarks", "lanch"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.splitlines() == [f'benchmarks: unknown benchmark "lanch": did you mean launch? Known: {", ".join(names())}']

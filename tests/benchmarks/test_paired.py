"""The harness compares fairly: in turns, pair by pair, and its command knows its names."""

import importlib
import inspect
import json
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import announced, names, progress
from benchmarks.paired import Row, Spread, Turn, Turns, compare, measure, over_ranks, ratios, take_turns

ROOT = Path(__file__).parents[2]


def test_ours_and_the_peer_take_turns_in_an_order_that_swaps():
    seen: list[str] = []
    turns = take_turns(
        lambda: seen.append("A"),
        lambda: seen.append("B"),
        pairs=4,
        warm_up=1,
        between=lambda: seen.append("|"),
    )
    assert "".join(seen) == "|A|B" + "|A|B|B|A|A|B|B|A"
    assert len(turns.ours) == len(turns.peer) == 4


def test_ratios_are_taken_within_pairs_so_that_a_drift_of_the_machine_cancels():
    assert ratios([1.0, 10.0, 100.0], [2.0, 20.0, 200.0]) == Spread(0.5, 0.5, 0.5, 3)


def test_the_peak_of_memory_is_that_of_the_turn_alone():
    def touch(size: int) -> None:
        # An array may lie in memory that malloc kept from earlier work, so that the peak does not
        # rise; a mapping never does.
        with mmap.mmap(-1, size) as memory:
            for page in range(0, size, mmap.PAGESIZE):
                memory[page] = 1

    assert measure(lambda: touch(32 << 20)).memory == pytest.approx(32 << 20, rel=0.3)
    assert measure(lambda: touch(8 << 20)).memory == pytest.approx(8 << 20, rel=0.3)


@pytest.mark.parametrize("name", names())
def test_a_run_says_at_the_start_how_many_rows_there_are_and_gives_each_as_soon_as_it_is_measured(name: str):
    module = importlib.import_module(f"benchmarks.{name}")
    pairs = inspect.signature(module.rows).parameters["pairs"].default
    assert f"{name}: {module.ROWS} rows of {pairs} pairs" in announced(name, pairs, module.ROWS, None)
    assert inspect.isgeneratorfunction(module.rows) or name == "launch", (
        "its rows are complete together, so they come together"
    )


def test_a_run_says_how_long_it_takes_and_how_long_the_rest_will():
    assert announced("ddp", 40, 24, (7.5, 2.8)).endswith("about 48 min on two idle cores")
    assert progress(2, 34, 120.0) == "  2 of 34 rows in 2 min; the others take about 32 min"
    assert progress(1, 2, 40.0).endswith("about 40 s")


def test_cpu_time_is_not_wall_time():
    turn = measure(lambda: time.sleep(0.2))
    assert turn.wall >= 0.2 > 10 * turn.cpu


def test_a_jobs_turn_is_its_slowest_rank_all_its_cpu_and_its_largest_peak():
    fast, slow = Turns([Turn(1, 1, 10)], [Turn(2, 1, 1)]), Turns([Turn(3, 2, 5)], [Turn(1, 4, 2)])
    assert over_ranks([fast, slow]) == Turns([Turn(3, 3, 10)], [Turn(2, 5, 2)])


def test_a_row_says_ours_over_the_peers_and_over_the_floor():
    turns = Turns([Turn(1, 2, 3 << 20)] * 3, [Turn(2, 4, 6 << 20)] * 3)
    row = compare("ddp", "torch", 2, turns, floor_cpu=1.0)
    assert [ratio.median for ratio in (row.time_ratio, row.cpu_ratio, row.memory_ratio, row.floor_ratio)] == [
        0.5,
        0.5,
        0.5,
        2.0,
    ]
    assert json.loads(json.dumps(row.as_json()))["time_ratio"] == {
        "median": 0.5,
        "low": 0.5,
        "high": 0.5,
        "pairs": 3,
    }
    assert Row("x", "y", 1).as_json()["memory_ratio"] is None


def test_each_comparison_is_a_module_and_the_harness_is_none():
    assert {"launch", "memory"} <= set(names())
    assert "paired" not in names()


def test_an_unknown_name_is_one_line_with_the_nearest():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "launchh"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.splitlines() == [
        f'benchmarks: unknown benchmark "launchh": did you mean launch? Known: {", ".join(names())}'
    ]

"""Random programs: a correct one never raises an alarm, however slow its ranks are.

A wrong one is always explained.
"""

import random
import sys
from pathlib import Path

import pytest

from dlo_lib.launch import DeadLock, run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import random_programs as programs


@pytest.mark.parametrize("seed", range(6))
def test_a_correct_program_raises_no_alarm(seed, tmp_path):
    world = 2 + seed % 3
    assert run_ranks(
        programs.run, world, programs.program(seed, world, 60), str(tmp_path), timeout=120
    ) == list(range(world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_correct_program_whose_ranks_hold_the_gil_for_seconds_raises_no_alarm(world, tmp_path):
    steps = programs.program(100 + world, world, 60, pauses=0.5, hold=3.0)
    assert any(step.what == "hold" for step in steps)
    assert run_ranks(programs.run, world, steps, str(tmp_path), timeout=240) == list(range(world))


def planted(seed: int, world: int) -> tuple[list[programs.Step], str, int, int]:
    """Return a program without threads, and a mistake on a rank in a step in which it has an effect."""
    draw = random.Random(seed)
    steps = programs.program(seed, world, 40, pauses=0.005, threads=False)
    wanted = [
        number
        for number, step in enumerate(steps)
        if len(step.members) > 1
        and step.what in [*programs.COLLECTIVES, *programs.MESSAGES]
        and step.what not in ("any", "object")
    ]
    at = draw.choice(wanted)
    step = steps[at]
    mistakes = ["skips", "returns"]
    if step.what not in ("barrier", "monitored"):
        mistakes.append("another type")
        if step.what != "all_to_all":  # here it would change both sides in the same way
            mistakes.append("another size")
    if step.what in ("broadcast", "reduce", "gather", "scatter"):
        mistakes.append("another peer")
    return steps, draw.choice(mistakes), draw.choice(step.members), at


@pytest.mark.parametrize("seed", range(8))
def test_a_program_with_a_mistake_in_it_is_explained(seed, tmp_path):
    world = 2 + seed % 3
    steps, mistake, culprit, at = planted(seed, world)
    with pytest.raises(DeadLock):
        run_ranks(programs.run, world, steps, str(tmp_path), mistake, culprit, at, timeout=30)

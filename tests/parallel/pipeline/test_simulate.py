"""The simulator agrees with a clock that ticks."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline.schedules import afab, make_schedule, one_f_one_b, zb_h1
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import ScheduleKind, read_csv
from dlo_lib.parallel.pipeline.validate import makes, uses

MAKERS = [functools.partial(make_schedule, kind) for kind in ScheduleKind]


def ticked(schedule, costs):
    """Starts by a clock of whole ticks: at each tick every free rank looks whether its
    next action can begin."""
    price = costs.of(schedule.stages)
    there: dict = {}
    place, free, starts = [0] * schedule.ranks, [0] * schedule.ranks, [[] for _ in schedule.rows]
    tick = 0
    while any(place[rank] < len(row) for rank, row in enumerate(schedule.rows)):
        moved = True
        while moved:  # an action that takes no time lets the next begin in the same tick
            moved = False
            for rank, row in enumerate(schedule.rows):
                if place[rank] == len(row) or free[rank] > tick:
                    continue
                action = row[place[rank]]
                arrivals = [
                    there.get(result, tick + 1)
                    + (costs.send if schedule.placement[result.stage] != rank else 0)
                    for result in uses(action, schedule.stages)
                ]
                if all(arrival <= tick for arrival in arrivals):
                    starts[rank].append(tick)
                    free[rank] = tick + price[action.kind][action.stage]
                    if (made := makes(action)) is not None:
                        there[made] = free[rank]
                    place[rank] += 1
                    moved = True
        tick += 1
    return starts


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(MAKERS), st.integers(1, 5), st.integers(1, 9), st.data())
def test_times_are_those_of_a_ticking_clock(make, ranks, micro_batches, data):
    schedule = make(ranks, micro_batches)
    whole = st.lists(st.integers(1, 5), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(data.draw(whole), data.draw(whole), data.draw(whole), data.draw(st.integers(0, 3)))
    run = simulate(schedule, costs)
    assert [[start for start, _ in row] for row in run.spans] == ticked(schedule, costs)


def test_a_slow_stage_sets_the_pace():
    run = simulate(
        one_f_one_b(3, 20), Costs(forward=[1, 3, 1], input_gradient=[1, 3, 1], weight_gradient=[1, 3, 1])
    )
    assert run.busy == (60, 180, 60)
    # the slow one never waits; a forward comes before it, a backward after it
    assert run.makespan == 1 + 180 + 2


def test_sending_costs_the_way_down_and_back_once_when_the_pipeline_is_full():
    quick, slow = simulate(afab(4, 8)), simulate(afab(4, 8), Costs(send=0.5))
    assert slow.makespan == quick.makespan + 2 * 3 * 0.5


def test_costs_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="forward has 2 costs for 3 stages"):
        simulate(one_f_one_b(3, 3), Costs(forward=[1, 2]))
    with pytest.raises(UserError, match="weight_gradient has a negative cost"):
        simulate(zb_h1(2, 2), Costs(weight_gradient=-1))


def test_what_cannot_be_carried_out_is_refused_with_the_cell():
    with pytest.raises(UserError, match=r"deadlock: rank 0, cell 1 \(0B0\)"):
        simulate(read_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))

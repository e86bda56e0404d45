"""The schedules are what the papers say, with the conditions under which the formulas hold."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.schedules import (
    SCHEDULES,
    afab,
    dualpipe_v,
    interleaved,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import B, I, ScheduleKind, W, in_a_loop, with_communication
from dlo_lib.parallel.pipeline.validate import validate

SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 8), (4, 2), (4, 4), (4, 7), (4, 16), (5, 11), (8, 32)]
COSTS = [Costs(), Costs(2.0, 2.0, 1.0), Costs(1.0, 1.5, 0.25), Costs(1.0, 1.0, 0.0)]
MAKERS = [entry.make for entry in SCHEDULES.values()]


def parts(costs):
    return costs.forward, costs.input_gradient, costs.weight_gradient


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_afab_and_1f1b_wait_for_the_pipeline_to_fill_and_to_drain(ranks, micro_batches, costs):
    forward, inputs, weights = parts(costs)
    for make in (afab, one_f_one_b):
        run = simulate(make(ranks, micro_batches), costs)
        assert run.bubble == pytest.approx([(ranks - 1) * (forward + inputs + weights)] * ranks)
        assert run.bubble_ratio == pytest.approx((ranks - 1) / micro_batches)
        assert max(run.bubble) / run.makespan == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_naive_model_parallelism_keeps_one_rank_at_work_at_a_time(ranks, micro_batches):
    run = simulate(naive(ranks, micro_batches))
    assert run.makespan == pytest.approx(sum(run.busy))
    assert run.in_flight() == (1,) * ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_afab_holds_every_micro_batch_and_1f1b_at_most_one_for_each_later_rank(ranks, micro_batches):
    assert simulate(afab(ranks, micro_batches)).in_flight() == (micro_batches,) * ranks
    assert simulate(one_f_one_b(ranks, micro_batches)).in_flight() == tuple(
        min(micro_batches, ranks - rank) for rank in range(ranks)
    )


@pytest.mark.parametrize("per_rank", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 6), (4, 4), (4, 8), (4, 32), (5, 10)])
def test_interleaving_divides_the_bubble_and_its_memory_is_the_formulas_where_ranks_divide_micro_batches(
    ranks, micro_batches, per_rank
):
    run = simulate(interleaved(ranks, micro_batches, per_rank))
    assert run.bubble_ratio == pytest.approx((ranks - 1) / (micro_batches * per_rank))
    held = [(per_rank - 1) * ranks + 2 * (ranks - rank - 1) + 1 for rank in range(ranks)]
    if per_rank > 1:
        assert run.in_flight() == tuple(min(micro_batches * per_rank, most) for most in held)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "per_rank"), [(4, 6, 2), (4, 5, 2), (4, 7, 3), (3, 8, 2), (8, 9, 2), (2, 7, 3)]
)
def test_equal_groups_keep_the_bubble_where_ranks_do_not_divide_micro_batches_and_pay_in_memory(
    ranks, micro_batches, per_rank
):
    run = simulate(interleaved(ranks, micro_batches, per_rank))
    assert run.bubble_ratio == pytest.approx((ranks - 1) / (micro_batches * per_rank))
    group = math.ceil(micro_batches / (micro_batches // ranks))
    most = [(per_rank - 1) * group + 2 * (ranks - rank - 1) + 1 for rank in range(ranks)]
    assert run.in_flight() == tuple(min(micro_batches * per_rank, held) for held in most)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 3), (2, 2), (2, 9), (4, 4), (4, 5), (4, 16), (8, 20)]
)
def test_zb_h1_fills_the_bubble_with_weight_parts_in_the_memory_of_1f1b(ranks, micro_batches, costs):
    forward, inputs, weights = parts(costs)
    run = simulate(zb_h1(ranks, micro_batches), costs)
    assert max(run.bubble) == pytest.approx((ranks - 1) * (forward + inputs - weights))
    assert run.in_flight() == simulate(one_f_one_b(ranks, micro_batches)).in_flight()


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 3), (2, 9), (4, 7), (4, 16), (8, 20)])
def test_zb_h2_buys_the_rest_of_the_bubble_with_twice_the_activations(ranks, micro_batches, costs):
    forward, inputs, weights = parts(costs)
    run = simulate(zb_h2(ranks, micro_batches), costs)
    assert max(run.idle) == pytest.approx((ranks - 1) * (forward + inputs - 2 * weights))
    assert run.in_flight() == tuple(min(micro_batches, 2 * (ranks - rank) - 1) for rank in range(ranks))


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 2), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (8, 16)]
)
def test_zb_v_has_no_bubble_and_every_rank_holds_what_1f1bs_first_does(ranks, micro_batches):
    run = simulate(zb_v(ranks, micro_batches))
    assert max(run.idle) == 0
    assert run.in_flight() == (2 * ranks,) * ranks  # stages of half the size


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 13), (8, 16)])
def test_dualpipe_v_holds_one_half_more_than_zb_v_and_its_steady_state_is_of_forwards_beside_whole_backwards(
    ranks, micro_batches
):
    schedule = dualpipe_v(ranks, micro_batches)
    run = simulate(schedule)
    assert max(run.idle) == ranks - 1
    assert run.in_flight() == (2 * ranks + 1,) * ranks
    assert any(action.kind is B for row in schedule.rows for action in row)


def test_weight_parts_left_open_hold_less_than_activations_do():
    schedule = zb_h1(4, 8)
    free, half = simulate(schedule).peak_memory(1.0, 0.0), simulate(schedule).peak_memory(1.0, 0.5)
    assert free == (4, 3, 2, 1)
    assert half == (4, 3.5, 3, 2.5)  # rank r leaves r weight parts open


sizes = st.tuples(st.integers(1, 9), st.integers(1, 24), st.integers(1, 3))


@settings(max_examples=1000, deadline=None)
@given(sizes)
def test_every_schedule_of_any_size_can_be_carried_out_with_sends_and_receives_and_short_queues(size):
    ranks, micro_batches, per_rank = size
    tables = [make(ranks, micro_batches) for make in MAKERS] + [interleaved(ranks, micro_batches, per_rank)]
    table = tables[(ranks + micro_batches + per_rank) % len(tables)]
    validate(table)
    written_out = with_communication(table)
    loop = table.placement == in_a_loop(ranks, table.stages // ranks)
    enough = 1 if table.stages == ranks else 2 * ranks if loop else 2  # messages in a queue between two ranks
    validate(written_out, enough)
    assert written_out.compute() == table
    run = simulate(table)
    assert run.makespan >= max(run.busy)
    assert all(
        start >= before for spans in run.spans for (_, before), (start, _) in itertools.pairwise(spans)
    )


def test_every_schedule_is_in_the_registry():
    assert SCHEDULES.keys() == set(ScheduleKind)


@pytest.mark.parametrize("make", MAKERS)
def test_a_backward_is_whole_or_in_two_parts_that_come_in_order(make):
    for row in make(4, 9).rows:
        for place, action in enumerate(row):
            if action.kind is W:
                assert action._replace(kind=I) in row[:place]
            if action.kind is B:
                assert action._replace(kind=I) not in row


@pytest.mark.parametrize(
    ("arguments", "message"), [((0, 4), "0 ranks"), ((4, 0), "0 micro-batches"), ((-1, 4), "-1 ranks")]
)
def test_a_pipeline_without_ranks_or_micro_batches_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        one_f_one_b(*arguments)
    with pytest.raises(UserError, match="0 stages a rank"):
        schedules.interleaved(2, 2, 0)


def test_a_large_table_is_made_at_the_cost_of_its_cells():
    schedule = zb_h1(64, 1024)
    assert sum(map(len, schedule.rows)) == 64 * 1024 * 3

"""The drawing shows the table as the simulator, or a measurement, has it in time."""

import matplotlib
import pytest
from matplotlib import pyplot

from dlo_lib.parallel.pipeline.draw import as_text, draw
from dlo_lib.parallel.pipeline.schedules import make_schedule, one_f_one_b, zb_h1
from dlo_lib.parallel.pipeline.simulate import Costs, Simulation, simulate
from dlo_lib.parallel.pipeline.table import ScheduleKind

matplotlib.use("agg")
TABLES = [make_schedule(kind, 4, 8) for kind in ScheduleKind]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_action_is_a_bar_where_the_simulator_has_it(table):
    run = simulate(table)
    (axes,) = draw(run).axes
    bars = [path.get_extents().intervalx for bars in axes.collections for path in bars.get_paths()]
    spans = [span for row in run.spans for span in row]
    assert sorted(end for bar in bars for end in bar) == pytest.approx(
        sorted(end for span in spans for end in span)
    )
    assert len(bars) == len(spans)
    assert axes.get_xlim() == (0, run.makespan)
    assert [text.get_text() for text in axes.texts] == [
        str(action.micro_batch) for row in table.rows for action in row
    ]


def test_a_number_is_shown_where_its_bar_is_wide_enough_on_a_shared_time_axis():
    (axes,) = draw(simulate(one_f_one_b(3, 4))).axes
    assert all(text.get_visible() for text in axes.texts)
    axes.set_xlim(0, 100 * axes.get_xlim()[1])  # a slower run on the same axis
    assert not any(text.get_visible() for text in axes.texts)


def test_a_measured_run_is_drawn_like_a_planned_one():
    run = simulate(one_f_one_b(3, 4))
    late = Simulation(
        run.schedule, tuple(tuple((start + 0.25, end + 0.25) for start, end in row) for row in run.spans)
    )
    (axes,) = draw(late, title="measured", unit="ms").axes
    assert axes.get_title(loc="left") == "measured"
    assert axes.get_xlabel() == "time (ms)"
    assert min(path.get_extents().x0 for bars in axes.collections for path in bars.get_paths()) == 0.25


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_memory_track_peaks_where_the_simulator_says_and_ends_empty(table):
    run = simulate(table)
    _, axes = draw(run, activations=1.0, for_weights=0.5).axes
    drawn = [line.get_ydata() for line in axes.lines]
    assert [max(held) for held in drawn] == pytest.approx(run.peak_memory(1.0, 0.5))
    assert [held[-1] for held in drawn] == [0.0] * table.ranks


def test_what_is_let_go_when_as_much_is_taken_leaves_no_notch():
    _, axes = draw(simulate(one_f_one_b(4, 8)), activations=1.0).axes
    times, held = axes.lines[3].get_data()  # the last rank: each forward follows a backward at once
    assert len(set(times)) == len(times)
    assert set(held[(times >= 3) & (times < 27)]) == {1.0}


def test_no_figure_stays_open_for_a_notebook_to_show_again():
    pyplot.close("all")
    draw(simulate(one_f_one_b(2, 3)), activations=1.0)
    assert pyplot.get_fignums() == []


def test_a_huge_table_is_drawn_without_numbers():
    assert not draw(simulate(one_f_one_b(8, 200))).axes[0].texts


def test_the_text_grid_shows_bubbles_as_blanks():
    assert as_text(simulate(zb_h1(2, 2))).splitlines() == [
        "rank 0  0F0 0F1     0I0 0W0 0I1 0W1",
        "rank 1      1F0 1I0 1F1 1I1 1W0 1W1",
    ]


def test_the_text_grid_fills_the_time_of_long_actions_with_dots():
    lines = as_text(simulate(one_f_one_b(2, 2), Costs([1.0, 2.0], 1.0, 1.0))).splitlines()
    assert lines[0].split() == ["rank", "0", "0F0", "0F1", "0B0", "...", "0B1", "..."]
    assert lines[1].split() == ["rank", "1", "1F0", "...", "1B0", "...", "1F1", "...", "1B1", "..."]

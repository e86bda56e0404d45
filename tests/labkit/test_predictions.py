"""Predictions stand beside what was measured; what is no number is refused in one sentence."""

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.labkit.figures import panels
from dlo_lib.labkit.predicted_bars import predicted_bars
from dlo_lib.labkit.predictions import compared, mark_predicted, scaled

MEASURED = {"AFAB": 12.0, "1F1B": 6.0}


def test_the_table_has_both_and_their_ratio():
    header, first, second = compared({"AFAB": 8, "1F1B": None}, MEASURED).splitlines()
    assert header.split() == ["predicted", "measured", "measured", "/", "predicted"]
    assert first.split() == ["AFAB", "8", "12", "1.50"]
    assert second.split() == ["1F1B", "-", "6", "-"]


def test_a_prediction_of_zero_has_no_ratio():
    assert compared({"AFAB": 0}, MEASURED).splitlines()[1].split() == ["AFAB", "0", "12", "-"]


@pytest.mark.parametrize(
    ("predicted", "says"),
    [
        ({"AFAB": "8"}, "the prediction of AFAB is '8': write a number"),
        ({"AFAB": True}, "the prediction of AFAB is True: write a number"),
        ({"afab": 8}, "afab"),
        ([8, 6], "write a dict"),
    ],
)
def test_a_bad_prediction_is_one_sentence(predicted, says):
    with pytest.raises(UserError, match=says):
        compared(predicted, MEASURED)


def test_only_predictions_are_drawn():
    (axes,) = panels()
    mark_predicted(axes, {"AFAB": 0, "1F1B": 1}, {"AFAB": None, "1F1B": ...})
    assert not axes.lines
    mark_predicted(axes, {"AFAB": 0, "1F1B": 1}, {"1F1B": 5})
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[1.0, 5.0]]


def test_bars_are_measured_and_diamonds_predicted():
    (axes,) = predicted_bars(MEASURED, {"1F1B": 20}, "ms").axes
    assert [bar.get_height() for bar in axes.patches] == [12.0, 6.0]
    (diamonds,) = axes.lines
    assert diamonds.get_xydata().tolist() == [[1.0, 20.0]]
    assert axes.get_ylim()[1] > 20


def test_bars_without_a_prediction_have_no_legend():
    (axes,) = predicted_bars(MEASURED, {"1F1B": None}, "ms", log=True).axes
    assert not axes.lines
    assert axes.get_legend() is None


def test_horizontal_predictions_lie_along_the_x_axis():
    (axes,) = panels()
    mark_predicted(axes, {"AFAB": 0, "1F1B": 1}, {"1F1B": 5}, horizontal=True)
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[5.0, 1.0]]


def test_scaled_predictions_keep_what_is_no_number():
    assert scaled({"AFAB": 8, "1F1B": None, "naive": "8", "ZB": True}, 0.5) == {
        "AFAB": 4.0,
        "1F1B": None,
        "naive": "8",
        "ZB": True,
    }

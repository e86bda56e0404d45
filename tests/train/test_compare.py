"""Reading runs from their event files, and the table that compares them."""

import math

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.train import train
from dlo_lib.train.compare import Pick, RunScalars, compare_runs, read_runs

tensorboard = pytest.importorskip("torch.utils.tensorboard")


def write(folder, **curves):
    with tensorboard.SummaryWriter(str(folder)) as board:
        for tag, values in curves.items():
            for step, value in enumerate(values, 1):
                board.add_scalar(tag, value, step)


@pytest.fixture
def runs(tmp_path):
    write(tmp_path / "cosine", loss=[3.0, 1.0, 2.0], accuracy=[0.1, 0.5, 0.4])
    write(tmp_path / "deep" / "step<1>", loss=[3.0, 2.0, 1.5])
    return tmp_path


def test_every_point_of_every_run_is_read(runs):
    first, second = read_runs(runs)
    assert (first.name, second.name) == ("cosine", "deep/step<1>")
    assert list(first.scalars["loss"]) == [(1, 3.0), (2, 1.0), (3, 2.0)]
    assert set(second.scalars) == {"loss"}


def test_a_long_curve_is_not_subsampled(tmp_path):
    write(tmp_path, loss=range(12_000))
    assert len(read_runs(tmp_path)[0].scalars["loss"]) == 12_000


def test_a_run_of_the_training_command_is_read(small_run):
    config = small_run(steps=3)
    loss = train(config).loss
    table = compare_runs(config.out, {"train/loss": Pick.LAST, "train/lr": Pick.HIGHEST})
    assert table.rows["run"] == pytest.approx((loss, config.lr))


def test_the_table_marks_the_best_of_each_column(runs):
    table = compare_runs(runs, {"loss": Pick.LOWEST, "accuracy": Pick.HIGHEST})
    assert table.rows["cosine"] == pytest.approx((1.0, 0.5))
    assert str(table).splitlines() == [
        "run           lowest loss  highest accuracy",
        "cosine                1 *             0.5 *",
        "deep/step<1>          1.5               nan",
    ]
    shown = table._repr_html_()
    assert "<td><b>1</b></td><td><b>0.5</b></td>" in shown
    assert "deep/step&lt;1&gt;" in shown, "the name of a folder is escaped"


def test_no_last_value_is_marked_as_best(runs):
    assert "*" not in str(compare_runs(runs, {"loss": Pick.LAST}))


@pytest.mark.parametrize(("pick", "value"), [(Pick.LAST, math.nan), (Pick.LOWEST, 1.0), (Pick.HIGHEST, 2.0)])
def test_a_diverged_run_keeps_its_best_value(pick, value):
    assert RunScalars("x", {"loss": [(1, 2.0), (2, 1.0), (3, math.nan)]}).pick("loss", pick) == pytest.approx(
        value, nan_ok=True
    )


def test_missing_runs_and_unknown_curves_raise_with_the_cure(runs, tmp_path):
    with pytest.raises(UserError, match='unknown curve "los": did you mean loss'):
        compare_runs(runs, {"los": Pick.LAST})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no event files below"):
        compare_runs(tmp_path / "empty", {"loss": Pick.LAST})

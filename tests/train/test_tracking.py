"""The record of a run, its curves in TensorBoard or MLflow, and the table that compares runs.

The rows of MLflow run where it is installed; it is not part of the course's environment.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.provenance import digest
from dlo_lib.data import open_dataset
from dlo_lib.train import track, train
from dlo_lib.train.compare import Pick, compare_runs, read_runs
from dlo_lib.train.curves import draw_curves, smoothed
from dlo_lib.train.report import hash_of_dataset
from dlo_lib.train.tracking import RECORD, Tracking, read_record

event_file_writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
MLFLOW = pytest.param(
    "mlflow", marks=pytest.mark.skipif(find_spec("mlflow") is None, reason="NOT TESTED HERE: MLflow")
)
BOTH = pytest.mark.parametrize("tracking", ["tensorboard", MLFLOW])
WHOLE = {"commit": "a" * 40, "seed": 0, "data": digest("images")}


def write(folder, losses, accuracy, **config):
    with track(folder, **WHOLE, config=config) as run:
        for step, loss in enumerate(losses, 1):
            run.log(step, {"loss": loss})
        run.log(len(losses), {"accuracy": accuracy})


@pytest.fixture
def table(tmp_path):
    write(tmp_path / "a", [3.0, 1.0], 0.5, lr=0.1, batch=32)
    write(tmp_path / "b", [3.0, 2.0], 0.9, lr=0.01, batch=32)
    write(tmp_path / "c", [3.0, math.nan], 0.7, lr=1.0, batch=64)
    columns = {"loss": Pick.LAST, "accuracy": Pick.HIGHEST}
    return compare_runs(tmp_path, columns, settings=("lr",))


@BOTH
def test_the_record_and_the_curves_of_a_run_are_read(tmp_path, tracking):
    with track(tmp_path / "lion", **WHOLE, config={"lr": 0.1}, tracking=tracking) as run:
        run.log(1, {"loss": 2.0, "test/accuracy": 0.5})
        run.log(2, {"loss": 1.0})
    [found] = read_runs(tmp_path)
    assert (found.name, found.settings, found.missing) == ("lion", {"lr": 0.1}, ())
    assert found.scalars == {"loss": [(1, 2.0), (2, 1.0)], "test/accuracy": [(1, 0.5)]}
    assert read_record(tmp_path / "lion").tracking is Tracking(tracking)


@BOTH
def test_a_resumed_run_replaces_the_points_after_its_checkpoint(tmp_path, tracking, monkeypatch):
    # The tenth file of a process is before the ninth by its name, if both are of one second.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    with track(tmp_path / "lion", **WHOLE, config={"lr": 0.1}, tracking=tracking) as run:
        for step in range(1, 7):
            run.log(step, {"loss": float(step)})
    resumed = track(tmp_path / "lion", **{**WHOLE, "commit": "b" * 40}, tracking=tracking, resumed_step=3)
    with resumed as run:
        for step in (4, 5):
            run.log(step, {"loss": -float(step)})
    [found] = read_runs(tmp_path)
    assert found.scalars["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, -4.0), (5, -5.0)]
    record = read_record(tmp_path / "lion")
    assert record.provenance.commit == "a" * 40
    assert record.resumed == ((3, "b" * 40),)


@BOTH
def test_a_run_that_lacks_a_field_is_marked_and_tracked(tmp_path, tracking, capsys):
    given = {"commit": "a" * 40, "config": {"lr": 0.1}, "tracking": tracking}
    with track(tmp_path / "lion", **given) as run:
        run.log(1, {"loss": 2.0})
    assert "lion is not reproducible, because its record has no seed, data hash" in capsys.readouterr().err
    assert json.loads((tmp_path / "lion" / RECORD).read_text())["missing"] == ["seed", "data hash"]
    shown = str(compare_runs(tmp_path, {"loss": Pick.LAST}))
    assert shown.splitlines()[0].endswith("not reproducible")
    assert shown.splitlines()[1].endswith("no seed, data hash")


def test_without_a_commit_the_one_of_the_working_directory_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert track("run", config={"lr": 1}, seed=0, data=WHOLE["data"]).provenance.missing == ("commit",)


def test_a_folder_holds_one_run(tmp_path):
    track(tmp_path / "lion", **WHOLE)
    with pytest.raises(UserError, match="already contains a run"):
        track(tmp_path / "lion", **WHOLE)
    (tmp_path / "lion" / RECORD).write_text("{}")
    with pytest.raises(UserError, match="is not the record of a run"):
        read_runs(tmp_path / "lion")


def test_mlflow_that_is_not_installed_and_an_unknown_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="pip install mlflow"):
        track(tmp_path / "lion", **WHOLE, tracking="mlflow")
    assert not (tmp_path / "lion").exists()
    with pytest.raises(UserError, match='tracking is "wandb": choose tensorboard or mlflow'):
        track(tmp_path / "lion", **WHOLE, tracking="wandb")


def test_the_table_is_sorted_by_a_curve_or_a_setting(table):
    assert list(table.rows) == ["a", "b", "c"]
    assert list(table.sorted("accuracy").rows) == ["b", "c", "a"], "the highest accuracy first"
    assert list(table.sorted("loss").rows) == ["a", "b", "c"], "a run without a finite value is last"
    assert list(table.sorted("loss", descending=True).rows) == ["b", "a", "c"]
    assert list(table.sorted("lr").rows) == ["b", "a", "c"]
    with pytest.raises(UserError, match='unknown column "acuracy": did you mean accuracy'):
        table.sorted("acuracy")


def test_the_table_is_filtered_by_settings_and_by_a_condition(table):
    assert list(table.where(batch=32).rows) == ["a", "b"]
    assert list(table.where(lambda run: run.settings["lr"] < 1, batch=32).sorted("lr").rows) == ["b", "a"]
    with pytest.raises(UserError, match="no run of the table"):
        table.where(batch=128)


def test_the_table_shows_settings_and_the_best_values(table):
    assert str(table).splitlines()[:2] == [
        "run    lr  last loss  highest accuracy  not reproducible",
        "a     0.1          1               0.5",
    ]
    assert "0.9 *" in str(table)
    assert "<td><b>0.9</b></td>" in table._repr_html_()


def test_an_unknown_setting_is_refused(tmp_path):
    write(tmp_path / "a", [1.0], 0.5, lr=0.1)
    with pytest.raises(UserError, match='unknown setting "lrr": did you mean lr'):
        compare_runs(tmp_path, {"loss": Pick.LAST}, settings=("lrr",))


def test_an_event_file_of_another_program_has_no_record(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    write(tmp_path / "a", [1.0], 0.5, lr=0.1)
    with SummaryWriter(str(tmp_path / "other")) as board:
        board.add_scalar("loss", 2.0, 1)
    first, second = read_runs(tmp_path)
    assert (first.missing, second.provenance) == ((), None)
    assert second.missing == ("commit", "seed", "configuration", "data hash")


@BOTH
def test_the_training_command_writes_a_record(small_run, tracking):
    config = small_run(checkpoint_every=4, tracking=tracking)
    shutil.rmtree(train(config).checkpoint)  # as if it had been killed between steps 4 and 6
    result = train(replace(config, resume=True))
    [run] = read_runs(config.out.parent)
    assert run.provenance.seed == config.seed
    assert run.provenance.data == hash_of_dataset(open_dataset(config.data, config.seq))
    assert (run.settings["optimizer"], run.settings["lr"]) == ("adamw", config.lr)
    assert set(run.missing) <= {"commit", "commit (files are changed and not committed)"}
    assert [step for step, _ in run.scalars["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert run.scalars["train/loss"][-1][1] == pytest.approx(result.loss)
    assert [step for step, _ in read_record(config.out).resumed] == [4]


def test_the_hash_of_a_data_set_is_that_of_its_contents():
    hashes = {
        hash_of_dataset(open_dataset(name, seq)) for name in ("arithmetic", "python") for seq in (16, 32)
    }
    assert len(hashes) == 4
    assert hash_of_dataset(open_dataset("python", 16)) in hashes


def test_smoothing_is_the_exponential_mean_corrected_for_its_start():
    values = [4.0, 2.0, math.nan, 8.0]
    expected = []
    for end in (1, 2, 2, 3):
        finite = [value for value in values if math.isfinite(value)][:end]
        weights = [0.5 ** (end - 1 - number) for number in range(end)]
        expected.append(sum(w * x for w, x in zip(weights, finite)) / sum(weights))
    assert smoothed(values, 0.5) == pytest.approx(expected)
    assert smoothed([1.0, 2.0], 0) == [1.0, 2.0]
    assert math.isnan(smoothed([math.nan, 1.0], 0.9)[0])
    with pytest.raises(UserError, match="weight of the smoothing is 1"):
        smoothed(values, 1)


def test_the_figure_has_one_smoothed_line_for_each_run_with_the_curve(table):
    pytest.importorskip("matplotlib")
    figure = draw_curves(table.where(batch=32).runs, "loss", weight=0.5)
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["a"] == pytest.approx(smoothed([3.0, 1.0], 0.5))
    assert {"a", "b"} <= set(lines)
    with pytest.raises(UserError, match='unknown curve "los"'):
        draw_curves(table.runs, "los")

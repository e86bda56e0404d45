"""The views of a job, during the run and afterwards: updated in the background, with the right limit."""

from __future__ import annotations

import json
import os
import queue
import re
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

jupyter_client = pytest.importorskip("jupyter_client")

from dlo_lib import cluster  # noqa: E402
from dlo_lib.base.errors import UserError  # noqa: E402
from dlo_lib.cluster import Job  # noqa: E402
from dlo_lib.cluster.run import records  # noqa: E402
from dlo_lib.cluster.site.description import Scheduler  # noqa: E402
from dlo_lib.cluster.slurm.states import ElementStatus, State  # noqa: E402
from dlo_lib.cluster.view.curve_styles import styles_of  # noqa: E402
from dlo_lib.cluster.view.live import page  # noqa: E402
from dlo_lib.hardware import gpu  # noqa: E402
from dlo_lib.train import Metrics  # noqa: E402

GIB = 2**30
SPLIT = {
    "load_seconds": 0.1,
    "forward_seconds": 0.2,
    "backward_seconds": 0.3,
    "optimizer_seconds": 0.1,
    "communication_seconds": 0.2,
}


def a_job(tmp_path: Path, settings: list[dict], card: str | None = None, **metrics: object) -> Job:
    """Return a job that has ended, with five lines of metrics for each element."""
    folder = records.jobs_dir() / "a-job"
    outs = [tmp_path / str(element) for element in range(len(settings))]
    over = tuple(
        ElementStatus(element, State.COMPLETED, elapsed="0:10", exit_code=0)
        for element in range(len(settings))
    )
    record = records.Record(
        "0123456789abcdef", "run", "here", Scheduler.SLURM, 2, tuple(settings), tuple(map(str, outs)),
        "2026-01-01T00:00:00", card, (records.Turn(7, tuple(range(len(settings)))),), over,
    )  # fmt: skip
    folder.mkdir()
    records.write(folder, record)
    for number, out in enumerate(outs):
        out.mkdir()
        held = (number + 1) * GIB
        lines = [
            asdict(Metrics(step, 5.0 - step, 0.1, 1.0, 10 * step, 100.0, 0.9, held, **SPLIT | metrics))
            for step in range(1, 6)
        ]
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Job(folder)


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_dashboard_draws_every_element_and_parts_that_add_up_to_the_step(tmp_path):
    figure = a_job(tmp_path, [{"batch": 2}, {"batch": 8}]).dashboard()
    loss, rate, split, memory = figure.axes
    assert [line.get_label() for line in loss.lines] == ["batch=2", "batch=8"]
    assert list(loss.lines[0].get_ydata()) == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert list(rate.lines[0].get_ydata()) == [100.0] * 5
    heights = [[bar.get_height() for bar in bars] for bars in split.containers]
    assert [sum(parts) for parts in zip(*heights)] == pytest.approx([900.0, 900.0])
    assert [list(line.get_xdata()) for line in memory.lines] == [[2, 8]], (
        "memory over the micro-batch, without a limit"
    )
    assert list(memory.lines[0].get_ydata()) == [1.0, 2.0]


def test_the_dashboard_of_a_large_sweep_can_be_read(tmp_path):
    """12 learning rates with 3 seeds: colours and dashes tell 36 curves apart, and constants are left out."""
    rates = [round(1e-4 * 1.6**power, 6) for power in range(12)]
    sweep = [{"model": "tiny", "seed": seed, "lr": rate} for seed in range(3) for rate in rates]
    figure = a_job(tmp_path, sweep).dashboard()
    figure.draw_without_rendering()
    loss, _, split, memory = figure.axes
    assert loss.lines[13].get_label() == "seed=1 lr=0.00016"
    looks = {(str(line.get_color()), line.get_linestyle()) for line in loss.lines}
    assert len(looks) == 36
    parts, curves = figure.legends
    said = [text.get_text() for text in curves.get_texts()]
    assert said == [*(f"lr={rate:.4g}" for rate in rates), "seed=0", "seed=1", "seed=2"]
    for axes in (split, memory):
        names = axes.get_xticklabels()
        assert [name.get_text() for name in names] == [f"{rate:.4g}" for rate in rates]
        boxes = sorted((name.get_window_extent() for name in names), key=lambda box: box.x0)
        assert all(left.x1 <= right.x0 for left, right in pairwise(boxes)), "labels do not overlap"
        assert axes.get_xlabel() == "lr; in each group seed=0,1,2"
    whole = figure.bbox
    for legend in (curves, parts):
        box = legend.get_window_extent()
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
        assert all(axes.get_window_extent().x1 <= box.x0 for axes in figure.axes), "it covers no curve"


def test_the_live_view_of_a_large_sweep_has_the_legend_of_the_dashboard(tmp_path):
    rates = [round(1e-4 * 1.6**power, 6) for power in range(12)]
    job = a_job(
        tmp_path, [{"model": "tiny", "seed": seed, "lr": rate} for seed in range(3) for rate in rates]
    )
    shown = page(job, job.status())
    assert "model=tiny" not in shown, "what all elements have is left out"
    assert '<td style="text-align:left">seed=0 lr=0.0001</td>' in shown
    curves = re.findall(r'id="line2d_\d+">\s*<path d="[^"]+" [^>]*style="([^"]+)"', shown)
    assert len({style for style in curves if "stroke-linecap" in style or "dasharray" in style}) >= 36
    written = re.findall(r"<!-- (\S+) -->", shown)
    assert written[-15:] == [*(f"lr={rate:.4g}" for rate in rates), "seed=0", "seed=1", "seed=2"]


@pytest.mark.parametrize(
    ("settings", "colours", "legend"),
    [
        ([{"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0}], 2, ["lr=0.1", "lr=0.2"]),
        ([{"seed": seed} for seed in range(40)], 40, [f"seed={n}" for n in (0, 6, 13, 20, 26, 32, 39)]),
        ([{"a": a, "b": b, "c": c} for a in "xyz" for b in (1, 2) for c in (1, 2)], 3, ["a=x", "a=y", "a=z"]),
        ([{"lr": 0.1}], 1, []),
    ],
)
def test_a_setting_has_the_colours_and_the_legend_says_which(settings, colours, legend):
    styles = styles_of(settings, "run")
    assert len({str(colour) for colour in styles.colours}) == colours
    assert [label for label, _, _ in styles.legend] == legend
    assert sorted(element for _, group in styles.groups for element in group) == list(range(len(settings)))


def test_memory_is_compared_with_the_gpu_that_the_run_used(tmp_path):
    memory = a_job(tmp_path, [{}], card="v100-16", gpu="v100-32").dashboard().axes[3]
    assert memory.lines[0].get_ydata()[0] == pytest.approx(gpu("v100-32").usable_bytes / GIB)
    assert texts(memory) == [f"usable on {gpu('v100-32').title}: {gpu('v100-32').usable_bytes / GIB:.1f} GiB"]


def test_without_a_known_gpu_memory_is_compared_with_that_of_the_site(tmp_path):
    memory = a_job(tmp_path, [{}], card="v100-16").dashboard().axes[3]
    assert texts(memory)[0].startswith(f"would be usable on {gpu('v100-16').title}")


def test_a_pipeline_has_no_parts_of_its_step(tmp_path):
    split = a_job(tmp_path, [{}], **dict.fromkeys(SPLIT)).dashboard().axes[2]
    assert texts(split)[0].startswith("not measured")


def test_without_metrics_the_dashboard_raises(tmp_path):
    job = a_job(tmp_path, [{}])
    (tmp_path / "0" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="has written no metrics yet; its state is completed"):
        job.dashboard()


def test_the_page_shows_states_reasons_settings_and_the_loss(tmp_path):
    job = a_job(tmp_path, [{"note": "<b>"}, {"note": "x"}, {"note": "y"}])
    statuses = [
        ElementStatus(0, State.PENDING, "Priority", "2026-01-02T03:04:05"),
        ElementStatus(1, State.RUNNING, elapsed="1:02"),
        ElementStatus(2, State.FAILED, exit_code=3),
    ]
    shown = page(job, statuses)
    for part in (
        "1 pending, 1 running, 1 failed",
        "Priority",
        "2026-01-02 03:04:05",
        "1:02",
        "failed (3)",
        "note=&lt;b&gt;",
        "<svg",
    ):
        assert part in shown


def test_of_a_large_sweep_the_elements_that_have_not_ended_are_shown(tmp_path):
    job = a_job(tmp_path, [{"n": number} for number in range(30)])
    statuses = [
        ElementStatus(number, State.RUNNING if number == 29 else State.COMPLETED) for number in range(30)
    ]
    shown = page(job, statuses)
    assert "n=29" in shown
    assert "and 18 more" in shown


SUBMIT = """
from dlo_lib import cluster
job = cluster.submit(["bash", "-c", "while [ ! -e go ]; do sleep 0.1; done"], name="slow")
job
"""


def test_the_view_is_kept_up_to_date_while_other_cells_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "DLO_SITE": "local", "DLO_POLL_S": "0.1"}
    manager, client = jupyter_client.manager.start_new_kernel(
        startup_timeout=600, kernel_name="python3", env=environment, cwd=str(tmp_path)
    )
    try:
        assert (
            client.execute_interactive(SUBMIT, timeout=120, output_hook=lambda message: None)["content"][
                "status"
            ]
            == "ok"
        )
        answer: list[str] = []
        heard = {"output_hook": lambda message: answer.append(message["content"].get("text", ""))}
        done = client.execute_interactive("print(job.done)", timeout=60, **heard)
        assert done["content"]["status"] == "ok"
        assert "False\n" in answer, "another cell ran while the job still runs"
        (tmp_path / "go").touch()
        assert "completed" in _last_view(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _last_view(client) -> str:
    """Return the view once no element runs or waits."""
    begun = time.monotonic()
    while time.monotonic() - begun < 60:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["msg_type"] == "update_display_data" and "completed" in (
            shown := message["content"]["data"]["text/html"]
        ):
            return shown
    raise AssertionError("the view was not brought up to date")


def test_in_a_terminal_the_table_is_printed(tmp_path, capsys):
    job = a_job(tmp_path, [{"lr": 0.1}])
    job.watch()
    assert capsys.readouterr().out == f"{job!r}\n"
    assert repr(job).splitlines()[-1].split() == ["0", "completed", "0:10", "lr=0.1"]
    assert cluster.jobs()[0].name == "run-01234567"

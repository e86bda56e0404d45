"""A live view of a job in the notebook: a table of its elements, and the loss so far.

A background thread queries the job and replaces the cell's output by its display id, so other cells can run.
It ends with the job or with the kernel. Outside a notebook the table is printed once.
"""

from __future__ import annotations

import io
import threading
import time
from typing import Any

from dlo_lib.cluster.pending import explanations
from dlo_lib.cluster.states import ElementStatus, State, summary
from dlo_lib.cluster.views import JobView, labels, settings_text
from dlo_lib.drawing import whole_numbers
from dlo_lib.errors import UserError
from dlo_lib.markup import render
from dlo_lib.text import tr

ROWS, CURVES = 12, 10
_COLOURS = {
    State.COMPLETED: "#009E73",
    State.RUNNING: "#0072B2",
    State.PENDING: "#777777",
    State.STOPPED: "#B36B00",
    State.UNKNOWN: "#777777",
}
_BAD = "#B00020"


def watch(job: JobView) -> threading.Thread | None:
    """Show ``job`` until it ends.

    Return the thread that updates it, or None if there is nothing to update.
    """
    shell = _notebook()
    if shell is None:
        print(job)
        return None
    from IPython.display import HTML, display

    statuses = job.status()
    shown = display(HTML(page(job, statuses)), display_id=True)
    if all(status.state.over for status in statuses):
        return None
    thread = threading.Thread(target=_keep, args=(job, shown), name=f"watch {job.name}", daemon=True)
    thread.start()
    return thread


def _keep(job: JobView, shown: Any) -> None:
    from IPython.display import HTML

    over, before = False, ""
    while not over:
        time.sleep(job.pace())
        try:
            statuses = job.status()
            over = all(status.state.over for status in statuses)
            now = page(job, statuses)
        except (UserError, OSError) as error:  # the controller is busy, or the job was removed
            now = render("lines", lines=str(error).splitlines())
            over = not job.folder.exists()
        if now != before:
            shown.update(HTML(now))
            before = now


def page(job: JobView, statuses: list[ElementStatus]) -> str:
    """Return the page: the table, and below it the loss of each element that has one."""
    record = job.record
    first = sorted(
        statuses, key=lambda status: (status.state.over, status.state is State.PENDING, status.element)
    )[:ROWS]
    rows = []
    for status in sorted(first, key=lambda status: status.element):
        colour = _COLOURS.get(status.state, _BAD)
        code = f" ({status.exit_code})" if status.exit_code else ""
        rest = (
            status.reason,
            status.start.replace("T", " "),
            status.elapsed,
            settings_text(record.settings[status.element]),
        )
        rows.append(
            {
                "element": status.element,
                "state": f"{status.text}{code}",
                "colour": colour,
                "rest": rest,
            }
        )
    heads = (tr("element"), tr("state"), tr("reason"), tr("start"), tr("elapsed"), tr("settings"))
    title = tr(
        "{name} on {site}, number {numbers}: {state}",
        name=job.name,
        site=record.site,
        numbers=record.numbers,
        state=summary(statuses),
    )
    more = tr("and {count} more", count=len(statuses) - ROWS) if len(statuses) > ROWS else ""
    return render(
        "job",
        title=title,
        heads=heads,
        rows=rows,
        more=more,
        waits=explanations(statuses),
        curves=_losses(job),
    )


def _losses(job: JobView) -> str:
    """Return the curves as SVG; "" if there are no metrics yet."""
    settings = job.record.settings
    said = labels(settings) if len(settings) > 1 else ["loss"]
    curves = {}
    for element in range(min(len(settings), CURVES)):
        points = [(line.step, line.loss) for line in job.metrics(element) if line.loss is not None]
        if points:
            curves[said[element]] = points
    if not curves:
        return ""
    from matplotlib.figure import Figure  # not pyplot, because its current figure belongs to the kernel

    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot(*zip(*points), label=label, marker="." if len(points) < 3 else "")
    axes.set(xlabel=tr("step"), ylabel=tr("loss (nats)"))
    whole_numbers(axes)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _notebook() -> Any:
    """Return the shell of this kernel, or None in a terminal and in scripts."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None

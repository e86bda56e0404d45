"""A live view of a job in the notebook: a table of its elements, and the loss so far.

A background thread queries the job and replaces the cell's output by its display id, so other cells can run.
It ends with the job or with the kernel. Outside a notebook the table is printed once.
"""

from __future__ import annotations

import io
import threading
import time
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.markup import render
from dlo_lib.base.text import tr
from dlo_lib.cluster.run.pending import explanations
from dlo_lib.cluster.slurm.states import ElementStatus, State, summary
from dlo_lib.cluster.view.curve_styles import styles_of
from dlo_lib.cluster.view.views import JobView, labels, settings_text

ROWS, CURVES = 12, 60
LINE_INCHES = 0.16
"""Height of a line of the legend."""
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
    said = labels(record.settings) if job.elements > 1 else [settings_text(record.settings[0])]
    rows = []
    for status in sorted(first, key=lambda status: status.element):
        colour = _COLOURS.get(status.state, _BAD)
        code = f" ({status.exit_code})" if status.exit_code else ""
        rest = (
            status.reason,
            status.start.replace("T", " "),
            status.elapsed,
            said[status.element],
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
    """Return the curves as SVG, with the colours and the legend of the dashboard; "" without metrics."""
    runs = {element: lines for element in range(min(job.elements, CURVES)) if (lines := job.metrics(element))}
    if not any(line.loss is not None for lines in runs.values() for line in lines):
        return ""
    from matplotlib.figure import Figure  # not pyplot, because its current figure belongs to the kernel

    from dlo_lib.cluster.view.dashboard import curves

    styles = styles_of(job.record.settings, job.name)
    explained = styles.handles() if job.elements > 1 else []
    height = max(2.4, 0.4 + LINE_INCHES * len(explained))
    figure = Figure(figsize=(7.5 if explained else 6, height), layout="constrained")
    axes = figure.subplots()
    curves(axes, runs, styles, "loss", tr("loss (nats)"))
    axes.spines[["top", "right"]].set_visible(False)
    if job.elements > CURVES:
        axes.set_title(tr("the first {count} elements", count=CURVES), fontsize=9)
    if explained:
        figure.legend(handles=explained, loc="outside right upper", frameon=False, fontsize=8)
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

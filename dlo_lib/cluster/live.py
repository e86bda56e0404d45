"""How a job is, in the notebook, kept up to date beside the kernel: a table of its elements, and the loss as far as it has come.

A thread of its own asks and draws, and the cell's output is replaced by its display id, so other cells run meanwhile. It ends with the job,
or with the kernel. Outside a notebook the table is printed, once.
"""

from __future__ import annotations

import html
import io
import threading
import time
from typing import TYPE_CHECKING, Any

from dlo_lib.cluster.states import ElementStatus, State, summary
from dlo_lib.errors import UserError
from dlo_lib.text import tr

if TYPE_CHECKING:
    from dlo_lib.cluster.job import Job

ROWS, CURVES = 12, 10
_COLOURS = {State.COMPLETED: "#009E73", State.RUNNING: "#0072B2", State.PENDING: "#777777"}
_BAD = "#B00020"


def watch(job: Job) -> threading.Thread | None:
    """Show ``job`` until it is over; the thread that does, or None when there is nothing to wait for."""
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


def _keep(job: Job, shown: Any) -> None:
    from IPython.display import HTML

    over, before = False, ""
    while not over:
        time.sleep(job.pace())
        try:
            statuses = job.status()
            over = all(status.state.over for status in statuses)
            now = page(job, statuses)
        except (UserError, OSError) as error:  # the controller is busy, or the job was forgotten meanwhile
            now = f"<pre>{html.escape(str(error))}</pre>"
            over = not job.folder.exists()
        if now != before:
            shown.update(HTML(now))
            before = now


def page(job: Job, statuses: list[ElementStatus]) -> str:
    """The table, and below it the loss of each element that has one."""
    from dlo_lib.cluster.job import settings_text

    record = job.record
    first = sorted(statuses, key=lambda status: (status.state.over, status.state is State.PENDING, status.element))[:ROWS]
    cells = []
    for status in sorted(first, key=lambda status: status.element):
        colour = _COLOURS.get(status.state, _BAD)
        code = f" ({status.exit_code})" if status.exit_code else ""
        row = [
            str(status.element),
            f'<b style="color:{colour}">{status.state.value}{code}</b>',
            html.escape(status.reason),
            html.escape(status.start.replace("T", " ")),
            html.escape(status.elapsed),
            html.escape(settings_text(record.settings[status.element])),
        ]
        cells.append("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in row) + "</tr>")
    heads = (tr("element"), tr("state"), tr("reason"), tr("begins, began"), tr("elapsed"), tr("settings"))
    table = "<table><tr>" + "".join(f'<th style="text-align:left">{head}</th>' for head in heads) + f"</tr>{''.join(cells)}</table>"
    numbers = ", ".join(str(turn.number) for turn in record.turns)
    title = tr("{name} on {site}, number {numbers}: {state}", name=job.name, site=record.site, numbers=numbers, state=summary(statuses))
    more = tr("and {count} more", count=len(statuses) - ROWS) if len(statuses) > ROWS else ""
    return f"<p><b>{html.escape(title)}</b></p>{table}<p>{more}</p>{_losses(job)}"


def _losses(job: Job) -> str:
    """The curves as SVG; empty when there is no metric yet."""
    from dlo_lib.cluster.job import settings_text

    settings = job.record.settings
    curves = {}
    for element in range(min(len(settings), CURVES)):
        points = [(line.step, line.loss) for line in job.metrics(element) if line.loss is not None]
        if points:
            curves[settings_text(settings[element]) or "loss"] = points
    if not curves:
        return ""
    from matplotlib.figure import Figure  # without pyplot, whose current figure is the kernel's own

    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot(*zip(*points), label=label, marker="." if len(points) < 3 else "")
    axes.set(xlabel=tr("step"), ylabel=tr("loss (nats)"))
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _notebook() -> Any:
    """The shell of the kernel around us, or None in a terminal and in scripts."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None

"""The metrics of a job in one figure: loss, throughput, the parts of a step's time, and peak memory.

The memory limit is the usable memory of the GPU that the run used, which the metrics name. If it ran without
a GPU, for example on this machine, the limit of the site's GPU is drawn as a thinner line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_lib.base.drawing import PHASES, new_figure, whole_numbers
from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.view.curve_styles import CurveStyles, styles_of
from dlo_lib.cluster.view.views import JobView
from dlo_lib.hardware import Gpu, gpu

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dlo_lib.train.metrics import Metrics

GIB = 2**30
PARTS = {name: PHASES[name] for name in ("load", "forward", "backward", "optimizer", "communication")}
_LIMIT = "#B00020"
_MANY, _LETTERS = 12, 60  # labels and their letters that fit below a chart side by side
_MOST_NAMES = 40  # the same, upright
_BAR = 0.7  # width
Runs = dict[int, "list[Metrics]"]


def plot_dashboard(job: JobView) -> Figure:
    """Draw the figure for a job, with a curve for each element that has metrics.

    Raises:
        UserError: there are no metrics yet.
    """
    elements = range(job.elements)
    runs = {element: lines for element in elements if (lines := job.metrics(element))}
    if not runs:
        raise UserError(
            tr("{job} has written no metrics yet; its state is {state}", job=job.name, state=job.state)
        )
    styles = styles_of(job.record.settings, job.name)
    figure = new_figure(11, 6.5)
    (loss, rate), (split, memory) = figure.subplots(2, 2)
    curves(loss, runs, styles, "loss", tr("loss (nats)"))
    curves(rate, runs, styles, "tokens_per_second", tr("tokens/s, all ranks"))
    rate.set_ylim(bottom=0)
    _split(split, runs, styles)
    _memory(memory, job, runs, styles)
    if len(runs) > 1 and styles.legend:
        figure.legend(handles=styles.handles(), loc="outside right upper", frameon=False, fontsize=8, ncols=1)
    for axes in (loss, rate, split, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def curves(axes: Axes, runs: Runs, styles: CurveStyles, name: str, title: str) -> None:
    """Draw a value of the metrics over the steps, one curve for each element.

    Args:
        runs: the metrics of each element.
        name: the field of ``Metrics``.
        title: of the vertical axis.
    """
    for element, lines in runs.items():
        points = [(line.step, value) for line in lines if (value := getattr(line, name)) is not None]
        if not points:
            continue
        axes.plot(
            *zip(*points),
            label=styles.labels[element],
            color=styles.colours[element],
            linestyle=styles.dashes[element],
            linewidth=1.5 if len(runs) <= _MANY else 1.0,
            marker="." if len(points) < 3 else "",
        )
    axes.set(xlabel=tr("step"), ylabel=title)
    whole_numbers(axes)


def _below(axes: Axes, runs: Runs, styles: CurveStyles) -> list[float]:
    """Label the horizontal axis of a bar chart of the elements; return the places of their bars."""
    places, centres, names = styles.places(list(runs))
    upright = len(names) > _MANY or sum(map(len, names)) > _LETTERS
    step = -(-len(names) // _MOST_NAMES)
    axes.set_xticks(centres[::step], names[::step], fontsize=8, rotation=90 if upright else 0)
    axes.set_xlim(min(places) - 0.8, max(places) + 0.8)
    axes.set_xlabel(styles.axis if len(runs) > 1 else "")
    return places


def _split(axes: Axes, runs: Runs, styles: CurveStyles) -> None:
    """Draw a bar for each element: the mean over its lines without the first, which includes warm-up."""
    base = [0.0] * len(runs)
    means = {element: _mean_parts(lines) for element, lines in runs.items()}
    if not any(means.values()):
        axes.text(
            0.5,
            0.5,
            tr("not measured: forward and backward\nof a pipeline alternate"),
            ha="center",
            va="center",
            color="#777777",
        )
        axes.set_axis_off()
        return
    places = _below(axes, runs, styles)
    for part, colour in PARTS.items():
        heights = [mean.get(part, 0.0) * 1e3 for mean in means.values()]
        axes.bar(places, heights, bottom=base, color=colour, label=tr(part), width=_BAR)
        base = [below + height for below, height in zip(base, heights)]
    axes.set_ylabel(tr("one step of rank 0 (ms)"))
    axes.figure.legend(
        handles=[bars[0] for bars in axes.containers],
        labels=[tr(part) for part in PARTS],
        loc="outside right lower",
        frameon=False,
        fontsize=8,
        title=tr("parts of a step"),
        title_fontsize=8,
        alignment="left",
    )


def _mean_parts(lines: list[Metrics]) -> dict[str, float]:
    warm = [line for line in lines if line.load_seconds is not None][-max(1, len(lines) - 1) :]
    found = {
        part: [value for line in warm if (value := getattr(line, f"{part}_seconds")) is not None]
        for part in PARTS
    }
    return {part: sum(values) / len(values) for part, values in found.items() if values}


def _memory(axes: Axes, job: JobView, runs: Runs, styles: CurveStyles) -> None:
    """Draw peak memory over the micro-batch if a sweep varies it, otherwise a bar for each element."""
    settings = job.record.settings
    peaks = {element: max(line.peak_bytes for line in lines) / GIB for element, lines in runs.items()}
    batches = [batch for element in runs if isinstance(batch := settings[element].get("batch"), int)]
    if len(batches) == len(runs) and len(set(batches)) > 1:
        axes.plot(batches, list(peaks.values()), "o", color=PARTS["backward"])
        axes.set_xlabel(tr("sequences in a micro-batch of one rank"))
        axes.set_xlim(left=0)
    else:
        axes.bar(_below(axes, runs, styles), list(peaks.values()), color=PARTS["backward"], width=_BAR)
    cards = {line.gpu for lines in runs.values() for line in lines if line.gpu is not None}
    for name in sorted(cards):
        _limit(axes, gpu(name), "--", tr("usable on {card}: {gib:.1f} GiB"))
    if not cards and (planned := _card_of_site(job)) is not None:
        _limit(axes, planned, ":", tr("would be usable on {card}: {gib:.1f} GiB"))
    axes.set_ylabel(tr("peak memory of rank 0 (GiB)"))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)


def _limit(axes: Axes, card: Gpu, style: str, label: str) -> None:
    usable = card.usable_bytes / GIB
    axes.axhline(usable, color=_LIMIT, linestyle=style, linewidth=1.5)
    said = label.format(card=card.title, gib=usable)
    where = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    axes.annotate(said, (0.02, usable), **where, color=_LIMIT, fontsize=8)  # type: ignore[arg-type]
    axes.set_ylim(top=max(axes.get_ylim()[1], usable * 1.05))


def _card_of_site(job: JobView) -> Gpu | None:
    card = job.record.card
    return None if card is None else gpu(card)

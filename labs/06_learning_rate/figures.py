"""The figures of this lab: each function draws what it is given and computes nothing of its own; lines are told apart by dashes and markers too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlo_lib.drawing import new_figure

STYLES = [
    ("#4c78a8", "-", "o"),
    ("#e4572e", "--", "s"),
    ("#59a14f", "-.", "^"),
    ("#b07aa1", ":", "D"),
    ("#9c755f", "-", "v"),
    ("#f1a208", "--", "P"),
    ("#666666", "-.", "X"),
]


def _panels(count: int = 1, width: float = 9, height: float = 3.4) -> list[Axes]:
    panels = list(new_figure(width, height).subplots(1, count, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return panels


def by_rate(losses: Mapping[float, Sequence[float]], accuracy: Mapping[float, float]) -> Figure:
    """Losses over the steps, a line for each learning rate; and the accuracy at the end against the rate."""
    left, right = _panels(2, 9, 4)
    for (rate, curve), (colour, dashes, _) in zip(losses.items(), STYLES):
        left.plot(curve, color=colour, linestyle=dashes, label=f"{rate:g}")
    left.set(xlabel="step", ylabel="training loss", ylim=(0, 4), title="one model, one batch order")
    left.legend(title="learning rate", frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=5)
    right.plot(list(accuracy), [100 * value for value in accuracy.values()], color="black", marker="o")
    right.set_xscale("log")
    right.set(xlabel="learning rate", ylabel="test accuracy (%)", ylim=(0, 102), title="after as many steps")
    return left.get_figure()


def tested(
    rates: Sequence[float], losses: Sequence[float], curve: Sequence[float], found: Mapping[str, float], reset: Mapping[float, float]
) -> Figure:
    """A range test: its losses, the smoothed curve, what it suggests; and beside it the test that begins anew for each rate."""
    left, right = _panels(2, 10)
    left.plot(rates[: len(losses)], losses, color="#bbbbbb", linewidth=1, label="loss")
    left.plot(rates[: len(curve)], curve, color=STYLES[0][0], linewidth=2, label="smoothed")
    for (name, rate), (colour, dashes, _) in zip(found.items(), STYLES[1:]):
        left.axvline(rate, color=colour, linestyle=dashes, label=f"{name}: {rate:.2g}")
    left.set(ylabel="loss", title="one run, the rate grows")
    left.legend(frameon=False, fontsize=8)
    right.plot(list(reset), list(reset.values()), color=STYLES[2][0], marker="o")
    right.set(title="a new start and a few steps for each rate")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set(xlabel="learning rate", ylim=(0, 2 * curve[0]))
    return left.get_figure()


def schedules(factors: Mapping[str, Sequence[float]], momenta: Sequence[float] = ()) -> Figure:
    """Factors over the steps; the momentum of OneCycle in a panel of its own."""
    panels = _panels(2 if momenta else 1, 10 if momenta else 9, 4)
    for (name, line), (colour, dashes, _) in zip(factors.items(), STYLES):
        panels[0].plot(line, color=colour, linestyle=dashes, label=name)
    panels[0].set(xlabel="step", ylabel="learning rate / peak", ylim=(-0.03, 1.08))
    panels[0].legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
    if momenta:
        panels[1].plot(momenta, color="black")
        panels[1].set(xlabel="step", ylabel="momentum", title="OneCycle")
    return panels[0].get_figure()


def spread(accuracies: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Every repeat as a point, the mean as a bar, a row for each name."""
    (axes,) = _panels(1, 9, 0.8 + 0.42 * len(accuracies))
    for row, (values, (colour, _, marker)) in enumerate(zip(accuracies.values(), STYLES)):
        percent = [100 * value for value in values]
        axes.plot(percent, [row] * len(percent), marker, color=colour, linestyle="none", alpha=0.6)
        axes.plot([sum(percent) / len(percent)] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=3)
    axes.set_yticks(range(len(accuracies)), list(accuracies))
    axes.set_ylim(len(accuracies) - 0.4, -0.6)
    axes.set(xlabel="test accuracy (%)", title=title)
    return axes.get_figure()


def budgets(accuracies: Mapping[str, Mapping[int, Sequence[float]]]) -> Figure:
    """Accuracy against the length of the run: points are repeats, the line goes through their means."""
    (axes,) = _panels()
    for (name, line), (colour, dashes, marker) in zip(accuracies.items(), STYLES):
        means = [100 * sum(values) / len(values) for values in line.values()]
        axes.plot(list(line), means, color=colour, linestyle=dashes, label=name)
        for epochs, values in line.items():
            axes.plot([epochs] * len(values), [100 * value for value in values], marker, color=colour, alpha=0.6)
    axes.set_xscale("log", base=2)
    several = sorted({epochs for line in accuracies.values() for epochs in line})
    axes.set_xticks(several, [str(epochs) for epochs in several])
    axes.set(xlabel="epochs in the whole run", ylabel="test accuracy (%)", title="each point is a run of its own length")
    axes.legend(frameon=False)
    return axes.get_figure()

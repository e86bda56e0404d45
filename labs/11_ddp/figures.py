"""The figures of this lab: each function draws its arguments.

``plans`` also computes: the times on a simple model of a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from torch import Tensor

from dlo_lib.labkit import predictions
from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    BLUE,
    KIB,
    LIMIT,
    MIB,
    MUTED,
    RANKS,
    SMALL,
    VERMILLION,
    finish,
    log_ticks,
    panels,
    styled,
    text_on,
)


@styled
def drift(silent: Sequence[Sequence[tuple]], talking: Sequence[Sequence[tuple]]) -> Figure:
    """Loss on the part of the rank and on all samples, and the distance of the weights from those of rank 0.

    On the left without, on the right with exchange.
    """
    axes = panels(2, 2, width=10.5, height=5.8, sharey="row", sharex=True)
    both = {"no exchange": silent, "with DistributedDataParallel": talking}
    for column, (name, ranks) in enumerate(both.items()):
        above, below = axes[column], axes[2 + column]
        for rank, seen in enumerate(ranks):
            style = RANKS[rank]
            above.plot([own for own, _, _ in seen], color=style.colour, lw=0.8, alpha=0.8)
            above.plot([whole for _, whole, _ in seen], **style.line(), label=f"rank {rank}")
            pairs = [(weight, first) for (*_, weight), (*_, first) in zip(seen, ranks[0])]
            distance = [float((weight - first).norm()) for weight, first in pairs]
            below.plot(distance, **style.line(), label=f"rank {rank}")
        finish(above, title=name)
        figure = finish(below, xlabel="step")
    axes[0].set_ylabel("loss (thin: own part)")
    axes[2].set_ylabel("weights: distance from rank 0")
    axes[2].legend()
    return figure


@styled
def plans(cases: Mapping[str, tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Figure:
    """A backward pass and its messages, for each title the bytes of each layer's gradient and the buckets.

    The machine: 1 ms of backward a layer; a message takes 1 ms, and 1 ms more for each 64 KiB.
    """
    axes = panels(rows=len(cases), width=10, height=1.6 * len(cases) + 0.3, sharex=True)
    for ax, (title, (nbytes, buckets)) in zip(axes, cases.items()):
        _plan(ax, nbytes, buckets)
        ax.set_title(title)
    axes[-1].set_xlabel("ms")
    return axes[-1].get_figure()


def _plan(ax: Axes, nbytes: Sequence[int], buckets: Sequence[Sequence[int]]) -> None:
    layers, free = len(nbytes), 0.0
    for i in range(layers):
        ax.barh(1, 1, left=layers - 1 - i, color=BLUE, edgecolor=BACKGROUND)
        ax.text(layers - 0.5 - i, 1, str(i), ha="center", va="center", color=text_on(BLUE), fontsize=SMALL)
    for number, bucket in enumerate(buckets):
        start = max(free, max(layers - i for i in bucket))
        free = start + 1 + sum(nbytes[i] for i in bucket) / (64 * KIB)
        ax.barh(0, free - start, left=start, color=VERMILLION, edgecolor=BACKGROUND, hatch="//")
        if free - start > 0.9:
            box = {"facecolor": BACKGROUND, "edgecolor": "none", "pad": 1}
            ax.text(
                (start + free) / 2,
                0,
                ascii_uppercase[number],
                ha="center",
                va="center",
                fontsize=SMALL,
                bbox=box,
            )
    ax.axvline(layers, color=MUTED, ls="--", lw=1.2)
    ax.text(free + 0.3, 0, f"waiting {free - layers:.1f} ms", va="center", color=LIMIT)
    ax.set_yticks([0, 1], ["messages", "backward of layer"])
    ax.margins(x=0.12)
    ax.spines[["top", "right", "left"]].set_visible(False)


@styled
def messages(seconds: Mapping[int, float], predicted: predictions.Predicted) -> Figure:
    """Time of the same bytes in more and more messages; predictions are multiples of the time of one."""
    (ax,) = panels(width=8, height=3.6)
    ax.plot(list(seconds), [1e3 * second for second in seconds.values()], "o-", color=BLUE)
    for count, second in seconds.items():
        place = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "fontsize": SMALL}
        ax.annotate(f"{1e3 * second:.1f}", (count, 1e3 * second), **place)
    positions = {f"{count} messages": count for count in seconds}
    guesses = {
        name: 1e3 * seconds[1] * guess for name, guess in predictions.numbers(predicted, positions).items()
    }
    predictions.mark_predicted(ax, positions, guesses)
    if guesses:
        ax.legend(loc="upper left")
    log_ticks(ax, "x", list(seconds))
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(ScalarFormatter())
    heights = [*(1e3 * second for second in seconds.values()), *guesses.values()]
    ax.set_ylim(0.5 * min(heights), 3 * max(heights))
    title = "the same bytes, more messages (2 ranks)"
    return finish(ax, xlabel="all-reduces for the same 2 MiB", ylabel="ms", title=title)


@styled
def waiting(seconds: Mapping[int, float], after_backward: float, predicted: predictions.Predicted) -> Figure:
    """Communication that backward does not hide, by bucket size; predictions in ms."""
    (ax,) = panels(width=8, height=3.6)
    limits = [limit / MIB for limit in seconds]
    milliseconds = [1e3 * second for second in seconds.values()]
    ax.plot(limits, milliseconds, "o-", color=BLUE, label="buckets, during backward")
    ax.axhline(1e3 * after_backward, color=LIMIT, ls="--", label="one message a parameter, after backward")
    predictions.mark_predicted(ax, {f"{limit:g} MiB": limit for limit in limits}, predicted)
    log_ticks(ax, "x", limits)
    ax.set_ylim(bottom=min(0, *milliseconds))
    ax.legend()
    title = "communication that is not hidden (2 ranks, 12 layers of 1 MiB, 4 ms each)"
    return finish(ax, xlabel="bucket size, MiB", ylabel="ms beyond backward", title=title)


def what_waiting_shows(seconds: Mapping[int, float]) -> str:
    """Return whether the measurement agrees with the text: the largest bucket hides nothing."""
    best, largest = min(seconds, key=lambda limit: seconds[limit]), max(seconds)
    if seconds[largest] >= 1.2 * seconds[best]:
        longer = 1e3 * (seconds[largest] - seconds[best])
        return (
            f"The best bucket here has {best // MIB} MiB; one bucket for all gradients waits {longer:.1f} ms "
            "longer."
        )
    smallest = min(seconds)
    more = 1e3 * (seconds[smallest] - seconds[largest])
    return (
        "This measurement disagrees with the text: one bucket for all gradients waits no longer than the "
        f"others. A bucket for each layer waits {more:+.1f} ms compared with it. If this stays so when you "
        "run the cell again, a message costs more here than it can hide; with larger layers or a slower "
        "link, several buckets win."
    )


@styled
def shares(epochs: Sequence[Sequence[Sequence[int]]], length: int) -> Figure:
    """Which rank sees which sample, a row for each epoch; a larger circle is a rank that sees it again."""
    (ax,) = panels(width=10, height=0.7 * len(epochs) + 1.1)
    for row, ranks in enumerate(epochs):
        seen: set[int] = set()
        for rank, samples in enumerate(ranks):
            for sample in samples:
                twice = sample in seen
                seen.add(sample)
                colour = RANKS[rank].colour
                fill = {"s": 330, "facecolor": "none"} if twice else {"s": 190, "facecolor": colour}
                ax.scatter(sample, row, edgecolor=colour, lw=1.5, **fill)
                if not twice:
                    text = {"ha": "center", "va": "center", "fontsize": SMALL, "color": text_on(colour)}
                    ax.text(sample, row, str(rank), **text)
    ax.set_yticks(range(len(epochs)), [f"epoch {epoch}" for epoch in range(len(epochs))])
    ax.set_ylim(len(epochs) - 0.4, -0.6)
    ax.set_xticks(range(length))
    ax.set_xlabel("sample; in the circle, the rank that sees it")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax.get_figure()


@styled
def spread(estimates: Mapping[int, Tensor]) -> Figure:
    """Standard deviations estimated from 2 samples a rank, over more and more ranks; the true one is 1."""
    (ax,) = panels(width=8, height=3.6)
    names = [f"{ranks}\n({2 * ranks})" for ranks in estimates]
    samples = [found.numpy() for found in estimates.values()]
    ax.boxplot(samples, showfliers=False, whis=(5, 95), medianprops={"color": VERMILLION})
    ax.set_xticks(range(1, len(names) + 1), names)
    ax.axhline(1, color=MUTED, ls="--", lw=1.2)
    title = "the same layer, 4,000 batches: boxes hold half of them, whiskers 90 %"
    return finish(ax, xlabel="ranks (samples)", ylabel="standard deviation", title=title)


@styled
def training(
    together: Mapping[str, Sequence], alone: Mapping[str, Sequence], predicted: predictions.Predicted
) -> Figure:
    """Loss and accuracy of 4 ranks over those of one process, and by how much their losses differ."""
    left, right, apart = panels(3, width=12.5, height=3.6)
    ylabels = {"loss": "loss of the batch, after its step", "accuracy": "accuracy on all samples"}
    for ax, (kind, ylabel) in zip((left, right), ylabels.items()):
        ax.plot(alone[kind], color=VERMILLION, lw=6, alpha=0.5, label="one process")
        ax.plot(together[kind], color=BLUE, lw=1.5, marker="o", ms=4, label="4 ranks")
        finish(ax, xlabel="step" if kind == "loss" else "epoch", ylabel=ylabel)
        ax.xaxis.get_major_locator().set_params(integer=True)
    names = ("largest difference of a loss", "accuracy at the end")
    guesses = predictions.numbers(predicted, dict.fromkeys(names))
    last = {"accuracy at the end": len(together["accuracy"]) - 1}
    predictions.mark_predicted(right, last, {name: guess for name, guess in guesses.items() if name in last})
    apart.plot(
        [abs(a - b) for a, b in zip(together["loss"], alone["loss"])],
        color=BLUE,
        marker="o",
        ms=4,
        label="measured",
    )
    if names[0] in guesses:
        apart.axhline(guesses[names[0]], color=BLACK, ls="--", label="your prediction")
    apart.set_yscale("symlog", linthresh=1e-8)
    figure = finish(apart, xlabel="step", ylabel="difference of the losses", title="4 ranks and one process")
    for ax in (left, right, apart):
        ax.legend()
    return figure

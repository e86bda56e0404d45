"""The figures of this lab: each function draws what it is given. ``plans`` alone computes: the times of a machine with round numbers.

Colours stay apart for colour-blind readers, and nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from torch import Tensor

from dlo_lib.drawing import new_figure

RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
COMPUTE, SEND, WAIT, GREY = "#0072B2", "#E69F00", "#B00020", "#666666"
STYLES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))
KIB = 1024


def _clean(ax: Axes, **labels) -> None:
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    ax.set_axisbelow(True)


def drift(silent: Sequence[Sequence[tuple]], talking: Sequence[Sequence[tuple]]) -> Figure:
    """Loss on the own part and on all samples, and the distance of the weights from rank 0's; without and with exchange."""
    figure = new_figure(10, 5.6)
    axes = figure.subplots(2, 2, sharey="row", sharex=True)
    for column, (name, ranks) in enumerate({"ranks that do not talk": silent, "gradients averaged": talking}.items()):
        above, below = axes[0][column], axes[1][column]
        for rank, seen in enumerate(ranks):
            above.plot([own for own, _, _ in seen], color=RANKS[rank], ls=":", lw=1)
            above.plot([whole for _, whole, _ in seen], color=RANKS[rank], ls=STYLES[rank], label=f"rank {rank}")
            distance = [float((weight - first).norm()) for (_, _, weight), (_, _, first) in zip(seen, ranks[0])]
            below.plot(distance, color=RANKS[rank], ls=STYLES[rank], label=f"rank {rank}")
        _clean(above, title=name)
        _clean(below, xlabel="step")
    axes[0][0].set_ylabel("loss (dotted: own part)")
    axes[1][0].set_ylabel("weights: distance from rank 0")
    axes[1][0].legend(frameon=False)
    return figure


def plans(cases: Mapping[str, tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Figure:
    """A backward pass and its messages, for each title the bytes of each layer's gradient and the buckets.

    The machine: 1 ms of backward a layer; a message takes 1 ms, and 1 ms more for each 64 KiB.
    """
    figure = new_figure(10, 1.5 * len(cases) + 0.3)
    axes = figure.subplots(len(cases), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (title, (nbytes, buckets)) in zip(axes, cases.items()):
        _plan(ax, nbytes, buckets)
        ax.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel("ms")
    return figure


def _plan(ax: Axes, nbytes: Sequence[int], buckets: Sequence[Sequence[int]]) -> None:
    layers, free = len(nbytes), 0.0
    for i in range(layers):
        ax.barh(1, 1, left=layers - 1 - i, color=COMPUTE, edgecolor="white")
        ax.text(layers - 0.5 - i, 1, str(i), ha="center", va="center", color="white", fontsize=8)
    for number, bucket in enumerate(buckets):
        start = max(free, max(layers - i for i in bucket))
        free = start + 1 + sum(nbytes[i] for i in bucket) / (64 * KIB)
        ax.barh(0, free - start, left=start, color=SEND, edgecolor="white", hatch="//")
        if free - start > 0.9:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text((start + free) / 2, 0, str(number), ha="center", va="center", fontsize=8, bbox=box)
    ax.axvline(layers, color=GREY, ls="--", lw=1)
    ax.text(free + 0.3, 0, f"waiting {free - layers:.1f} ms", va="center", color=WAIT)
    ax.set_yticks([0, 1], ["messages", "backward of layer"])
    ax.margins(x=0.12)
    ax.spines[["top", "right", "left"]].set_visible(False)


def messages(seconds: Mapping[int, float]) -> Figure:
    """Time of the same bytes in more and more messages."""
    figure = new_figure(8, 3.4)
    ax = figure.subplots()
    ax.plot(list(seconds), [1e3 * second for second in seconds.values()], "o-", color=COMPUTE)
    for count, second in seconds.items():
        ax.annotate(f"{1e3 * second:.1f}", (count, 1e3 * second), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_xticks(list(seconds))
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.set_ylim(5e2 * min(seconds.values()), 3e3 * max(seconds.values()))
    _clean(ax, xlabel="all-reduces for the same 2 MiB", ylabel="ms", title="the same bytes, more messages (2 ranks)")
    return figure


def waiting(seconds: Mapping[int, float], after_backward: float) -> Figure:
    """Communication that did not hide behind backward, by bucket size."""
    figure = new_figure(8, 3.6)
    ax = figure.subplots()
    limits = [limit / KIB for limit in seconds]
    ax.plot(limits, [1e3 * second for second in seconds.values()], "o-", color=COMPUTE, label="buckets, during backward")
    ax.axhline(1e3 * after_backward, color=WAIT, ls="--", label="one message a parameter, after backward")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_xticks(limits)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    _clean(ax, xlabel="bucket size, KiB", ylabel="ms beyond backward", title="what does not hide (2 ranks, 24 layers of 64 KiB, 2 ms each)")
    return figure


def shares(epochs: Sequence[Sequence[Sequence[int]]], length: int) -> Figure:
    """Who sees which sample, one row an epoch."""
    figure = new_figure(10, 0.7 * len(epochs) + 1.1)
    ax = figure.subplots()
    for row, ranks in enumerate(epochs):
        seen: set[int] = set()
        for rank, samples in enumerate(ranks):
            for sample in samples:
                twice = sample in seen
                seen.add(sample)
                ax.scatter(sample, row, s=330 if twice else 170, facecolor="none" if twice else RANKS[rank], edgecolor=RANKS[rank], lw=1.5)
                if not twice:
                    ax.text(sample, row, str(rank), ha="center", va="center", color="white", fontsize=9)
    ax.set_yticks(range(len(epochs)), [f"epoch {epoch}" for epoch in range(len(epochs))])
    ax.set_ylim(len(epochs) - 0.4, -0.6)
    ax.set_xticks(range(length))
    ax.set_xlabel("sample; in the circle, the rank that sees it")
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return figure


def spread(estimates: Mapping[int, Tensor]) -> Figure:
    """Standard deviations estimated from 2 samples a rank, over more and more ranks; the true one is 1."""
    figure = new_figure(8, 3.4)
    ax = figure.subplots()
    names = [f"{ranks}\n({2 * ranks})" for ranks in estimates]
    ax.boxplot([found.numpy() for found in estimates.values()], showfliers=False, whis=(5, 95), medianprops={"color": WAIT})
    ax.set_xticks(range(1, len(names) + 1), names)
    ax.axhline(1, color=GREY, ls="--", lw=1)
    _clean(
        ax,
        xlabel="ranks (samples)",
        ylabel="standard deviation",
        title="the same layer, 4,000 batches: boxes hold half of them, whiskers 90 %",
    )
    return figure


def training(together: Mapping[str, Sequence], alone: Mapping[str, Sequence]) -> Figure:
    """Loss and accuracy of 4 ranks over those of one process."""
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    for ax, kind, ylabel in ((left, "loss", "loss of the batch, after its step"), (right, "accuracy", "accuracy on all samples")):
        ax.plot(alone[kind], color=RANKS[1], lw=5, alpha=0.6, label="one process")
        ax.plot(together[kind], color=RANKS[0], lw=1.2, marker="o", ms=3, label="4 ranks")
        _clean(ax, xlabel="step" if kind == "loss" else "epoch", ylabel=ylabel)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(frameon=False)
    return figure

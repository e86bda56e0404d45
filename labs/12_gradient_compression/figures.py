"""The figures of this lab: each function draws its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dlo_lib.labkit.figures import LIMIT, METHODS, MUTED, SMALL, finish, log_ticks, panels, styled
from dlo_lib.labkit.predictions import Predicted, numbers


@styled
def compressed(gradient: Tensor) -> Figure:
    """The gradient of a layer and four approximations of it: 16 bits, the largest 1 %, one bit, rank 2."""
    flat = gradient.flatten()
    kept = torch.zeros_like(flat)
    places = flat.abs().topk(flat.numel() // 100).indices
    kept[places] = flat[places]
    u, s, v = torch.linalg.svd(gradient)
    forms = {
        "fp32": gradient,
        "fp16": gradient.half().float(),
        "top 1 %": kept.view_as(gradient),
        "one bit": gradient.sign() * gradient.abs().mean(),
        "rank 2": u[:, :2] * s[:2] @ v[:2],
    }
    axes = panels(len(forms), width=12, height=2.9)
    limit = float(flat.abs().quantile(0.98))
    for ax, (name, form) in zip(axes, forms.items()):
        ax.imshow(form.numpy(), cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
        error = float((form - gradient).norm() / gradient.norm())
        ax.set(title=f"{name}: error {error:.0%}", xticks=[], yticks=[])
    return axes[0].get_figure()


def lines(ax: Axes, series: Mapping[str, Sequence[float]], x: Sequence[float] = ()) -> None:
    """Draw a line for each name, over ``x`` or the steps."""
    for style, (name, values) in zip(METHODS, series.items()):
        ax.plot(x or range(1, len(values) + 1), values, **style.line(), label=name)


@styled
def feedback(norms: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]]) -> Figure:
    """On the left three convex functions, on the right a small network, with and without error feedback."""
    left, right = panels(2, width=12, height=3.9)
    lines(left, norms)
    lines(right, losses)
    left.legend(loc="upper left")
    right.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    log = {"xlabel": "step", "yscale": "log"}
    finish(left, ylabel="|x|", title="three functions, the largest element of three", **log)
    return finish(right, ylabel="loss on all samples", title="a network on four ranks", **log)


@styled
def variance(norms: Mapping[str, Sequence[float]], fires: Mapping[str, int | None]) -> Figure:
    """Norms of the raw and of the corrected variance; a dot is the step at which the rule is true."""
    (ax,) = panels(width=8, height=3.4)
    lines(ax, norms)
    for style, offset, (name, step) in zip(METHODS, (9, -18), fires.items()):
        if step is not None:
            dot = (step, norms[name][step - 1])
            ax.plot(*dot, "o", ms=9, color=style.colour)
            ax.annotate(f"step {step}", dot, (4, offset), textcoords="offset points", fontsize=SMALL)
    ax.legend()
    ax.set_ylim(0, 1.1 * max(max(values) for values in norms.values()))
    return finish(ax, xlabel="step", ylabel="norm", title="is the variance stable?")


@styled
def by_bytes(runs: Mapping[str, tuple[Sequence[float], Sequence[float]]], switch: int) -> Figure:
    """The same losses over the steps, and over the bytes that a rank has sent; a grey line is the switch."""
    left, right = panels(2, width=11, height=3.7, sharey=True)
    for style, (name, (losses, sent)) in zip(METHODS, runs.items()):
        left.plot(range(1, len(losses) + 1), losses, **style.line(), label=name)
        right.plot([nbytes / 1e6 for nbytes in sent], losses, **style.line(), label=name)
    left.set_ylim(0.97 * min(losses), 1.03 * losses[len(losses) // 6])  # the first steps are alike
    for ax, place in ((left, switch), (right, sent[switch - 1] / 1e6)) if switch else ():
        ax.axvline(place, color=MUTED, lw=1)
    right.legend(loc="upper right")
    finish(left, xlabel="step", ylabel="loss on all samples")
    return finish(right, xlabel="MB sent by a rank")


@styled
def at_scale(
    gbits: Sequence[float], seconds: Mapping[str, Sequence[float]], predicted: Predicted, found: Predicted
) -> Figure:
    """Seconds of backward and communication over the bandwidth; on the right, where the fastest changes."""
    for ax, step in zip(panels(2, width=13, height=4), (2, 1)):
        lines(ax, seconds, gbits)
        for values, colour, label in ((found, MUTED, "found"), (predicted, LIMIT, "your prediction")):
            for value in numbers(values, found).values():
                ax.axvline(value, color=colour, lw=1, label=label)
        log_ticks(ax, "x", [2**power for power in range(0, 12, step)])
        if step == 2:
            log_ticks(ax, "y", [0.5, 1, 2, 5, 10, 50])
        finish(ax, xlabel="Gb/s of a GPU's link", ylabel="seconds of a backward of Llama 3.2 1B")
    ax.set(xlim=(32, 512), ylim=(0.64, 0.74))
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    return ax.figure

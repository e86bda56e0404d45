"""The figures of this lab: each function draws its arguments.

Colours are those of ``plot_memory``, so that a part looks the same everywhere.
"""

from __future__ import annotations

import html
from statistics import median

import torch
from IPython.display import HTML
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dlo_lib.hardware import Gpu
from dlo_lib.labkit.figures import (
    BACKGROUND,
    BLACK,
    GIB,
    GREEN,
    LIMIT,
    METHODS,
    MIB,
    MUTED,
    SMALL,
    finish,
    legend,
    log_ticks,
    panels,
    styled,
    text_on,
)
from dlo_lib.labkit.predictions import Predicted, mark_predicted
from dlo_lib.models import LlamaConfig
from dlo_lib.models.llama import Block, rope_frequencies
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS

STATE = (Part.WEIGHTS, Part.OPTIMIZER_STATE, Part.GRADIENTS)
MOMENTS = {
    "loss": COLOURS[Part.LOGITS_AND_LOSS],
    "loss gradient": COLOURS[Part.ACTIVATIONS],
    "last gradient": COLOURS[Part.GRADIENTS],
    "optimizer step": COLOURS[Part.STEP_TEMPORARIES],
}


@styled
def replicas(held: dict[Part, int], ranks: int) -> Figure:
    """The memory of each rank of a data-parallel job, to scale, and the all-reduce between them."""
    (ax,) = panels(width=10, height=4.4)
    parts = [*STATE, Part.ACTIVATIONS]
    heights = {part: held[part] / GIB for part in parts}
    heights[Part.GRADIENTS] = held[Part.WEIGHTS] / GIB  # one per weight
    for rank in range(ranks):
        bottom = 0.0
        for part in parts:
            own = part is Part.ACTIVATIONS
            look = {"color": COLOURS[part], "edgecolor": BACKGROUND, "hatch": "//" if own else None}
            ax.bar(rank, heights[part], 0.6, bottom=bottom, **look)
            label = f"of batch share {rank}" if own else "the same"
            middle = bottom + heights[part] / 2
            box = {"facecolor": BACKGROUND, "edgecolor": "none", "pad": 1.5} if own else None
            colour = BLACK if own else text_on(COLOURS[part])
            ax.text(rank, middle, label, ha="center", va="center", color=colour, fontsize=SMALL, bbox=box)
            if part is Part.GRADIENTS and rank < ranks - 1:
                arrow = {"arrowstyle": "<->", "color": COLOURS[part], "linewidth": 2}
                ax.annotate("", (rank + 0.7, middle), (rank + 0.3, middle), arrowprops=arrow)
                above = {"xytext": (0, 4), "textcoords": "offset points"}
                ax.annotate("all-reduce", (rank + 0.5, middle), **above, ha="center", fontsize=SMALL)
            bottom += heights[part]
    ax.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    hatches = {Part.ACTIVATIONS: {"hatch": "//", "edgecolor": BACKGROUND}}
    handles = [Patch(facecolor=COLOURS[part], label=part.value, **hatches.get(part, {})) for part in parts]
    legend(ax, "right", handles=handles, reverse=True)
    return finish(
        ax,
        ylabel="GiB, the largest of each part",
        title="Data parallelism: the state is copied, the batch is divided",
    )


@styled
def parameters(counts: dict[str, dict[str, int]]) -> Figure:
    """Parameters by part of several models, as horizontal bars."""
    (ax,) = panels(width=9, height=0.9 + 0.55 * len(counts))
    names = ("embedding", "attention", "mlp", "norms", "head")
    colours = {name: style.colour for name, style in zip(names, METHODS)}
    for row, parts in enumerate(counts.values()):
        left = 0.0
        for part, colour in colours.items():
            label = part if row == 0 else None
            ax.barh(
                row,
                parts[part] / 1e9,
                0.6,
                left=left,
                color=colour,
                edgecolor=BACKGROUND,
                lw=0.5,
                label=label,
            )
            left += parts[part] / 1e9
        ax.text(left + 0.05, row, f"{left:.2f}", va="center")
    ax.set_yticks(range(len(counts)), list(counts))
    ax.invert_yaxis()
    legend(ax, "right")
    most = max(sum(parts.values()) for parts in counts.values()) / 1e9
    return finish(ax, "x", xlabel="parameters (10⁹)", xlim=(0, 1.08 * most))


@styled
def optimizer_steps(predicted: dict[str, dict[str, int]], measured: dict[str, dict[Phase, int]]) -> Figure:
    """The memory of the optimiser's step by implementation: predicted by part (bars), measured (diamonds)."""
    (ax,) = panels(width=9.5, height=4)
    parts = {
        "weights": Part.WEIGHTS,
        "optimizer": Part.OPTIMIZER_STATE,
        "gradients": Part.GRADIENTS,
        "temporaries": Part.STEP_TEMPORARIES,
    }
    for column, (step, state) in enumerate(predicted.items()):
        bottom = 0.0
        for name, part in parts.items():
            label = f"{name} (yours)" if column == 0 else None
            ax.bar(column, state[name] / GIB, 0.5, bottom=bottom, color=COLOURS[part], label=label)
            bottom += state[name] / GIB
        found = measured[step][Phase.OPTIMIZER] / GIB
        ax.plot(column, found, "D", color=BLACK, markersize=8, label="measured" if column == 0 else None)
        box = {"facecolor": BACKGROUND, "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
        place = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center", "bbox": box}
        ax.annotate(f"{found:.1f}", (column, found), weight="bold", **place)
    backward = max(peaks[Phase.BACKWARD] for peaks in measured.values()) / GIB
    ax.axhline(backward, color=MUTED, linestyle=":", label=f"forward and backward: {backward:.1f}")
    ax.set_xticks(range(len(predicted)), list(predicted))
    legend(ax, "right", reverse=True)
    most = max(max(peaks.values()) for peaks in measured.values()) / GIB
    return finish(ax, ylabel="GiB", title="The step of AdamW, three implementations", ylim=(0, 1.12 * most))


def saved_by_block(config: LlamaConfig, tokens: int) -> HTML:
    """Run one block under bf16 autocast and list what autograd saves, each storage by its shape."""
    names = {
        tokens: "seq",
        config.hidden: "hidden",
        config.num_heads * config.head_dim: "num_heads·head_dim",
        config.num_kv_heads * config.head_dim: "num_kv_heads·head_dim",
        config.intermediate: "intermediate",
        config.num_heads: "num_heads",
        config.num_kv_heads: "num_kv_heads",
        config.head_dim: "head_dim",
        1: "1",
    }
    block = Block(config)
    angles = torch.outer(torch.arange(tokens).float(), rope_frequencies(config))
    rotation = torch.cat((angles, angles), dim=-1)
    cos, sin = rotation.cos(), rotation.sin()
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(1, tokens, config.hidden, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        block(x, cos, sin)

    held_anyway = (*block.parameters(), cos, sin)
    known = {tensor.untyped_storage().data_ptr() for tensor in held_anyway}
    rows = []
    for tensor in saved:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in known:
            continue
        known.add(storage.data_ptr())
        weight = tokens not in tensor.shape
        without_batch = tensor.shape[1:] if tensor.shape[0] == 1 else tensor.shape
        shape = " × ".join(names[size] for size in without_batch)
        what = "copy of a weight" if weight else "activation"
        per_token = "" if weight else f"{storage.nbytes() / tokens:g}"
        rows.append((what, shape, str(tensor.dtype).removeprefix("torch."), per_token))
    sizes = ", ".join(f"{name} = {size}" for size, name in names.items() if name != "1")
    titles = ("what", "shape", "dtype", "bytes per token")
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in titles)
    body = "".join(  # opacity, not a colour: it suits the light and the dark theme
        f"<tr style='opacity:{0.65 if row[0].startswith('copy') else 1}'>"
        + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return HTML(f"<p>{sizes}</p><table><tr>{head}</tr>{body}</table>")


@styled
def activations(
    predicted: dict[tuple[int, bool], dict[str, int]],
    measured: dict[tuple[int, bool], dict[Part, int]],
) -> Figure:
    """Activations and logits against the batch, with and without checkpointing, yours and measured."""
    left, right = panels(2, width=11, height=4)
    for checkpointing, marker, style in ((False, "o", "-"), (True, "s", "--")):
        batches = sorted(batch for batch, chosen in predicted if chosen is checkpointing)
        name = "checkpointing" if checkpointing else "everything kept"
        kept = [predicted[batch, checkpointing]["activations"] / GIB for batch in batches]
        left.plot(batches, kept, style, color=COLOURS[Part.ACTIVATIONS], label=f"{name}, yours")
        found = {batch: held for (batch, chosen), held in measured.items() if chosen is checkpointing}
        peaks = [held[Part.ACTIVATIONS] / GIB for held in found.values()]
        hollow = {"color": BLACK, "markersize": 9, "fillstyle": "none"}
        left.plot(list(found), peaks, marker, label=f"{name}, measured", **hollow)
        if not checkpointing:
            colour = COLOURS[Part.LOGITS_AND_LOSS]
            for copies in (1, 2, 3):
                line = [copies * predicted[batch, checkpointing]["logits"] / GIB for batch in batches]
                right.plot(batches, line, "-", color=colour, alpha=0.3 + 0.2 * copies)
                place = {"textcoords": "offset points", "xytext": (4, -4)}
                right.annotate(f"{copies} × yours", (batches[-1], line[-1]), **place)
            peaks = [held[Part.LOGITS_AND_LOSS] / GIB for held in found.values()]
            right.plot(list(found), peaks, "o", label="measured", **hollow)
    for ax in (left, right):
        ax.legend(loc="upper left")
        ax.set_xticks([1, 2, 4, 8])
        ax.set_ylim(bottom=0)
    right.set_xlim(right=10)
    finish(left, title="activations", xlabel="batch", ylabel="GiB")
    return finish(right, title="logits and loss", xlabel="batch", ylabel="GiB")


@styled
def moments(predicted: dict[str, dict[str, int]], measured: dict[str, int]) -> Figure:
    """The four moments of a step for several settings (bars); the measured peak is at the largest bar."""
    (ax,) = panels(width=11, height=4.4)
    width = 0.19
    for column, (setting, held) in enumerate(predicted.items()):
        for index, (moment, colour) in enumerate(MOMENTS.items()):
            x = column + (index - 1.5) * width
            label = f"{moment} (yours)" if column == 0 else None
            ax.bar(x, held[moment] / GIB, 0.9 * width, color=colour, label=label)
            if held[moment] == max(held.values()):
                found = measured[setting] / GIB
                label = "measured peak" if column == 0 else None
                ax.plot(x, found, "D", color=BLACK, markersize=7, label=label)
                place = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center"}
                ax.annotate(f"{found:.1f}", (x, found), weight="bold", **place)
    ax.set_xticks(range(len(predicted)), [name.replace(", ", ",\n") for name in predicted])
    legend(ax, "right")
    return finish(ax, ylabel="GiB", title="Where is the peak?", ylim=(0, 1.12 * max(measured.values()) / GIB))


def fitting(peaks: dict[str, int], gpus: dict[str, Gpu]) -> HTML:
    """A table of settings and GPUs: whether a step fits, and the memory to spare."""
    sizes = {name: f"<small>{card.usable_bytes / GIB:.1f} GiB</small>" for name, card in gpus.items()}
    head = "".join(f"<th>{name}<br>{size}</th>" for name, size in sizes.items())
    body = ""
    for setting, peak in peaks.items():
        cells = ""
        for card in gpus.values():
            spare = (card.usable_bytes - peak) / GIB
            fill, word = (GREEN, "fits") if spare >= 0 else (LIMIT, "no")
            cells += f"<td style='text-align:center;background:{fill};color:{text_on(fill)}'>"
            cells += f"<b>{word}</b><br><small>{spare:+.1f} GiB</small></td>"
        name = f"<td style='text-align:left'>{html.escape(setting)}</td>"
        body += f"<tr>{name}<td><b>{peak / GIB:.1f}</b></td>{cells}</tr>"
    head = f"<th style='text-align:left'>batch 1</th><th>peak, GiB</th>{head}"
    return HTML(f"<table><tr>{head}</tr>{body}</table>")


@styled
def ranks(
    predicted: dict[int, int], measured: dict[int, int], floor: int, gpus: dict[str, Gpu], expected: Predicted
) -> Figure:
    """Memory of each rank against the number of ranks; the state as floor, GPUs as lines, guesses as
    diamonds."""
    (ax,) = panels(width=10, height=4.8)
    worlds = list(predicted)
    peaks = [held / GIB for held in predicted.values()]
    ax.plot(worlds, peaks, "-o", color=COLOURS[Part.LOGITS_AND_LOSS], label="peak of a rank, by step_peak")
    found = [held / GIB for held in measured.values()]
    ax.plot(list(measured), found, "s", color=BLACK, fillstyle="none", markersize=11, label="measured")
    mark_predicted(ax, {f"{world} ranks": float(world) for world in worlds}, expected)
    label = f"state: {floor / GIB:.1f} GiB on every rank"
    ax.fill_between(worlds, 0, floor / GIB, color=COLOURS[Part.WEIGHTS], alpha=0.25, label=label)
    lines: dict[float, list[str]] = {}
    for name, card in gpus.items():
        usable = card.usable_bytes / GIB
        close = (other for other in lines if abs(other - usable) < 2)  # lines this close share a label
        same = next(close, usable)
        lines.setdefault(same, []).append(name)
    for usable, names in lines.items():
        ax.axhline(usable, color=LIMIT, linestyle="--", linewidth=1.2)
        note = {"va": "center", "color": LIMIT, "fontsize": SMALL, "backgroundcolor": BACKGROUND}
        ax.text(worlds[-1] * 1.3, usable, ",\n".join(names), **note)
    log_ticks(ax, "x", worlds)
    ax.legend(loc="upper center", frameon=True, framealpha=1)
    title = "More ranks divide the batch, not the state"
    most = max(card.usable_bytes for card in gpus.values()) / GIB
    return finish(ax, title=title, xlabel="ranks", ylabel="GiB per rank", ylim=(0, 1.1 * most))


@styled
def training(
    curves: dict[int, list],
    memory: dict[int, list[dict[str, int]]],
    predicted: dict[int, int],
) -> Figure:
    """Loss, throughput and memory of several runs; ``memory[world][rank]`` is by part, at the peak."""
    loss, speed, held = panels(3, width=13, height=4)
    for index, ((world, lines), style) in enumerate(zip(curves.items(), METHODS)):
        steps, losses = [line.step for line in lines], [line.loss for line in lines]
        label = f"{world} rank{'s' if world > 1 else ''}"
        loss.plot(steps, losses, **style.line(), linewidth=max(1.5, 4 - 1.2 * index), label=label)
        settled = lines[len(lines) // 2 :]  # the first steps warm up
        rate = median(line.tokens_per_second for line in settled)
        speed.bar(index, rate, 0.55, color=style.colour)
        speed.text(index, rate, f"{rate:,.0f}", ha="center", va="bottom")
    loss.legend()
    loss.xaxis.set_major_locator(MaxNLocator(integer=True))
    speed.margins(y=0.1)

    place, ticks, labels = 0.0, [], []
    for world, by_rank in memory.items():
        ticks.append(place + (world - 1) / 2)
        labels.append(str(world))
        for parts in by_rank:
            bottom = 0.0
            for part, colour in COLOURS.items():
                size = parts[part.value] / MIB
                if not size:
                    continue
                label = part.value if place == 0 and size > 0.1 else None
                held.bar(place, size, 0.85, bottom=bottom, color=colour, label=label)
                bottom += size
            place += 1
        span = [place - world - 0.45, place - 0.55]
        level = [predicted[world] / MIB] * 2
        held.plot(span, level, color=BLACK, linewidth=2.5, label="yours" if place == 1 else None)
        place += 1
    held.set_xticks(ticks, labels)
    legend(held, "right", reverse=True)
    held.margins(y=0.08)
    speed.set_xticks(range(len(curves)), [str(world) for world in curves])
    finish(loss, title="loss", xlabel="step", ylabel="nats per byte")
    finish(speed, title="throughput", xlabel="ranks", ylabel="tokens/s")
    return finish(held, title="peak of each rank", xlabel="ranks (one bar each)", ylabel="MiB")

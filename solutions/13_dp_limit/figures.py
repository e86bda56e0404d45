"""The figures of this lab: each function draws what it is given and computes nothing of its own.

Colours are those of ``plot_memory``, so that a part looks the same everywhere. They stay apart for colour-blind readers, and nothing is
said by colour alone.
"""

from __future__ import annotations

import html
from statistics import median

import torch
from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dlo_lib.drawing import new_figure
from dlo_lib.hardware import Gpu
from dlo_lib.models import LlamaConfig
from dlo_lib.models.llama import Block, rope_frequencies
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part
from dlo_lib.profiling.plot import COLOURS

GIB, MIB = 2**30, 2**20
LIMIT, GREY = "#B00020", "#666666"
STATE = (Part.WEIGHTS, Part.OPTIMIZER_STATE, Part.GRADIENTS)
MOMENTS = {
    "loss": COLOURS[Part.LOGITS_AND_LOSS],
    "loss gradient": COLOURS[Part.ACTIVATIONS],
    "last gradient": COLOURS[Part.GRADIENTS],
    "optimizer step": COLOURS[Part.STEP_TEMPORARIES],
}


def _axes(width: float = 9, height: float = 3.8, columns: int = 1):
    return new_figure(width, height).subplots(1, columns)


def _clean(ax: Axes, **labels) -> Figure:
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    ax.set_axisbelow(True)
    return ax.get_figure()


def replicas(held: dict[Part, int], ranks: int) -> Figure:
    """What each rank of a data-parallel job holds, to scale, and what travels between them."""
    ax = _axes(9, 4.4)
    parts = [*STATE, Part.ACTIVATIONS]
    heights = {part: held[part] / GIB for part in parts} | {Part.GRADIENTS: held[Part.WEIGHTS] / GIB}  # one per weight
    for rank in range(ranks):
        bottom = 0.0
        for part in parts:
            own = part is Part.ACTIVATIONS
            ax.bar(rank, heights[part], 0.6, bottom=bottom, color=COLOURS[part], edgecolor="white", hatch="//" if own else None)
            label = f"of batch share {rank}" if own else "the same"
            middle = bottom + heights[part] / 2
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if own else None
            ax.text(rank, middle, label, ha="center", va="center", color="black" if own else "white", fontsize=9, bbox=box)
            if part is Part.GRADIENTS and rank < ranks - 1:
                arrow = {"arrowstyle": "<->", "color": COLOURS[part], "linewidth": 2}
                ax.annotate("", (rank + 0.7, middle), (rank + 0.3, middle), arrowprops=arrow)
                ax.text(rank + 0.5, middle + 0.8, "all-reduce", ha="center", fontsize=8, color=COLOURS[part])
            bottom += heights[part]
    ax.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    handles = [Patch(facecolor=COLOURS[part], label=part.value, hatch="//" if part is Part.ACTIVATIONS else None) for part in parts]
    ax.legend(handles=handles[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return _clean(ax, ylabel="GiB", title="Data parallelism: the state is copied, the batch is divided")


def parameters(counts: dict[str, dict[str, int]]) -> Figure:
    """Parameters by part of several models, as lying bars."""
    ax = _axes(9, 0.9 + 0.55 * len(counts))
    colours = dict(zip(("embedding", "attention", "mlp", "norms", "head"), ("#0072B2", "#56B4E9", "#E69F00", "#000000", "#CC79A7")))
    for row, parts in enumerate(counts.values()):
        left = 0.0
        for part, colour in colours.items():
            ax.barh(row, parts[part] / 1e9, 0.6, left=left, color=colour, label=part if row == 0 else None)
            left += parts[part] / 1e9
        ax.text(left + 0.05, row, f"{left:.2f}", va="center")
    ax.set_yticks(range(len(counts)), list(counts))
    ax.invert_yaxis()
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _clean(ax, xlabel="parameters (10⁹)", xlim=(0, 1.08 * max(sum(parts.values()) for parts in counts.values()) / 1e9))
    ax.grid(axis="y", visible=False)
    return ax.get_figure()


def optimizer_steps(predicted: dict[str, dict[str, int]], measured: dict[str, dict[Phase, int]]) -> Figure:
    """The memory of the optimiser's step by implementation: predicted by part (bars), measured (diamonds)."""
    ax = _axes(9, 4)
    parts = {"weights": Part.WEIGHTS, "optimizer": Part.OPTIMIZER_STATE, "gradients": Part.GRADIENTS, "temporaries": Part.STEP_TEMPORARIES}
    for column, (step, state) in enumerate(predicted.items()):
        bottom = 0.0
        for name, part in parts.items():
            label = f"{name} (yours)" if column == 0 else None
            ax.bar(column, state[name] / GIB, 0.5, bottom=bottom, color=COLOURS[part], label=label)
            bottom += state[name] / GIB
        found = measured[step][Phase.OPTIMIZER] / GIB
        ax.plot(column, found, "D", color="black", markersize=8, label="measured" if column == 0 else None)
        ax.annotate(f"{found:.1f}", (column, found), textcoords="offset points", xytext=(0, 8), ha="center", weight="bold")
    backward = max(peaks[Phase.BACKWARD] for peaks in measured.values()) / GIB
    ax.axhline(backward, color=GREY, linestyle=":", linewidth=1.8, label=f"forward and backward: {backward:.1f}")
    ax.set_xticks(range(len(predicted)), list(predicted))
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return _clean(
        ax,
        ylabel="GiB",
        title="The step of AdamW, three implementations",
        ylim=(0, 1.12 * max(max(peaks.values()) for peaks in measured.values()) / GIB),
    )


def saved_by_block(config: LlamaConfig, tokens: int) -> HTML:
    """Run one block under bf16 autocast and list each storage that autograd saves, with its shape in the sizes' own names."""
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
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        block(x, cos, sin)

    known = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), cos, sin)}  # held anyway, saved or not
    rows = []
    for tensor in saved:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in known:
            continue
        known.add(storage.data_ptr())
        weight = tokens not in tensor.shape
        shape = " × ".join(names[size] for size in (tensor.shape[1:] if tensor.shape[0] == 1 else tensor.shape))  # without the batch of 1
        what = "copy of a weight" if weight else "activation"
        per_token = "" if weight else f"{storage.nbytes() / tokens:g}"
        rows.append((what, shape, str(tensor.dtype).removeprefix("torch."), per_token))
    sizes = ", ".join(f"{name} = {size}" for size, name in names.items() if name != "1")
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in ("what", "shape", "dtype", "bytes per token"))
    body = "".join(
        f"<tr style='color:{GREY if row[0].startswith('copy') else 'inherit'}'>"
        + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return HTML(f"<p>{sizes}</p><table><tr>{head}</tr>{body}</table>")


def activations(predicted: dict[tuple[int, bool], dict[str, int]], measured: dict[tuple[int, bool], dict[Part, int]]) -> Figure:
    """Activations and logits against the batch, without and with checkpointing: lines predicted, markers measured."""
    left, right = _axes(10, 4, columns=2)
    for checkpointing, marker, style in ((False, "o", "-"), (True, "s", "--")):
        batches = sorted(batch for batch, chosen in predicted if chosen is checkpointing)
        name = "checkpointing" if checkpointing else "everything kept"
        kept = [predicted[batch, checkpointing]["activations"] / GIB for batch in batches]
        left.plot(batches, kept, style, color=COLOURS[Part.ACTIVATIONS], label=f"{name}, yours")
        found = {batch: held for (batch, chosen), held in measured.items() if chosen is checkpointing}
        peaks = [held[Part.ACTIVATIONS] / GIB for held in found.values()]
        left.plot(list(found), peaks, marker, color="black", markersize=8, fillstyle="none", label=f"{name}, measured")
        if not checkpointing:
            colour = COLOURS[Part.LOGITS_AND_LOSS]
            for copies in (1, 2, 3):
                line = [copies * predicted[batch, checkpointing]["logits"] / GIB for batch in batches]
                right.plot(batches, line, "-", color=colour, alpha=0.3 + 0.2 * copies)
                right.annotate(f"{copies} × yours", (batches[-1], line[-1]), textcoords="offset points", xytext=(4, -4), color=colour)
            peaks = [held[Part.LOGITS_AND_LOSS] / GIB for held in found.values()]
            right.plot(list(found), peaks, "o", color="black", markersize=8, fillstyle="none", label="measured")
    for ax in (left, right):
        ax.legend(frameon=False, loc="upper left")
        ax.set_xticks([1, 2, 4, 8])
        ax.set_ylim(bottom=0)
    right.set_xlim(right=9.6)
    _clean(left, title="activations of the blocks", xlabel="batch", ylabel="GiB")
    return _clean(right, title="logits and loss", xlabel="batch", ylabel="GiB")


def moments(predicted: dict[str, dict[str, int]], measured: dict[str, int]) -> Figure:
    """The four moments of a step for several settings (bars), and the measured peak of each (diamond at its largest bar)."""
    ax = _axes(10.5, 4.4)
    width = 0.19
    for column, (setting, held) in enumerate(predicted.items()):
        for index, (moment, colour) in enumerate(MOMENTS.items()):
            x = column + (index - 1.5) * width
            ax.bar(x, held[moment] / GIB, 0.9 * width, color=colour, label=f"{moment} (yours)" if column == 0 else None)
            if held[moment] == max(held.values()):
                found = measured[setting] / GIB
                ax.plot(x, found, "D", color="black", markersize=7, label="measured peak" if column == 0 else None)
                ax.annotate(f"{found:.1f}", (x, found), textcoords="offset points", xytext=(0, 9), ha="center", weight="bold")
    ax.set_xticks(range(len(predicted)), [name.replace(", ", ",\n") for name in predicted])
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return _clean(ax, ylabel="GiB", title="Where is the peak?", ylim=(0, 1.12 * max(measured.values()) / GIB))


def fitting(peaks: dict[str, int], gpus: dict[str, Gpu]) -> HTML:
    """A table: settings by GPUs, "fits" or by how much it does not."""
    head = "".join(f"<th>{name}<br><small>{card.usable_bytes / GIB:.1f} GiB</small></th>" for name, card in gpus.items())
    body = ""
    for setting, peak in peaks.items():
        cells = ""
        for card in gpus.values():
            spare = (card.usable_bytes - peak) / GIB
            style, word = ("background:#cdebdf;color:#00432f", "fits") if spare >= 0 else ("background:#f6d5d0;color:#6b0f00", "no")
            cells += f"<td style='text-align:center;{style}'><b>{word}</b><br><small>{spare:+.1f} GiB</small></td>"
        body += f"<tr><td style='text-align:left'>{html.escape(setting)}</td><td><b>{peak / GIB:.1f}</b></td>{cells}</tr>"
    return HTML(f"<table><tr><th style='text-align:left'>batch 1</th><th>peak, GiB</th>{head}</tr>{body}</table>")


def ranks(predicted: dict[int, int], measured: dict[int, int], floor: int, gpus: dict[str, Gpu]) -> Figure:
    """Memory of each rank against the number of ranks, with the state as the floor and the GPUs' usable memory as lines."""
    ax = _axes(9.5, 4.6)
    worlds = list(predicted)
    ax.plot(worlds, [held / GIB for held in predicted.values()], "-o", color=COLOURS[Part.ACTIVATIONS], label="peak of a rank (yours)")
    found = [held / GIB for held in measured.values()]
    ax.plot(list(measured), found, "D", color="black", fillstyle="none", markersize=10, label="measured")
    ax.fill_between(worlds, 0, floor / GIB, color=COLOURS[Part.WEIGHTS], alpha=0.25, label=f"state: {floor / GIB:.1f} GiB on every rank")
    lines: dict[float, list[str]] = {}
    for name, card in gpus.items():
        usable = card.usable_bytes / GIB
        same = next((other for other in lines if abs(other - usable) < 2), usable)  # lines that cannot be told apart share a label
        lines.setdefault(same, []).append(name)
    for usable, names in lines.items():
        ax.axhline(usable, color=LIMIT, linestyle="--", linewidth=0.9)
        ax.text(worlds[-1] * 1.3, usable, ",\n".join(names), va="center", color=LIMIT, fontsize=9, backgroundcolor="white")
    ax.set_xscale("log", base=2)
    ax.set_xticks(worlds, [str(world) for world in worlds])
    ax.legend(loc="upper center", frameon=True, framealpha=1)
    title = "More ranks divide the batch. The state stays."
    return _clean(
        ax, title=title, xlabel="ranks", ylabel="GiB per rank", ylim=(0, 1.1 * max(card.usable_bytes for card in gpus.values()) / GIB)
    )


def training(curves: dict[int, list], memory: dict[int, list[dict[str, int]]], predicted: dict[int, int]) -> Figure:
    """Loss, throughput and memory of real runs on several ranks; ``memory[world][rank]`` is by part, at the peak."""
    loss, speed, held = _axes(12, 4, columns=3)
    colours = dict(zip(curves, ("#0072B2", "#E69F00", "#009E73")))
    for index, (world, lines) in enumerate(curves.items()):
        style = ("-", "--", ":")[index % 3]
        loss.plot([line.step for line in lines], [line.loss for line in lines], style, color=colours[world], linewidth=3 - 0.6 * index)
        loss.lines[-1].set_label(f"{world} rank{'s' if world > 1 else ''}")
        settled = lines[len(lines) // 2 :]  # the first steps warm up
        rate = median(line.tokens_per_second for line in settled)
        speed.bar(index, rate, 0.55, color=colours[world])
        speed.text(index, rate, f"{rate:,.0f}", ha="center", va="bottom")
    loss.legend(frameon=False)
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
                held.bar(place, size, 0.85, bottom=bottom, color=colour, label=part.value if place == 0 and size > 0.1 else None)
                bottom += size
            place += 1
        span = [place - world - 0.45, place - 0.55]
        held.plot(span, [predicted[world] / MIB] * 2, color="black", linewidth=2.5, label="yours" if place == 1 else None)
        place += 1
    held.set_xticks(ticks, labels)
    handles, names = held.get_legend_handles_labels()
    held.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    held.margins(y=0.08)
    speed.set_xticks(range(len(curves)), [str(world) for world in curves])
    _clean(loss, title="loss (nats per byte)", xlabel="step")
    _clean(speed, title="throughput, tokens/s", xlabel="ranks")
    return _clean(held, title="peak of each rank, MiB", xlabel="ranks (one bar each)")

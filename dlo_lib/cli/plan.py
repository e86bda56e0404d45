"""``dlo plan``: the best plans of a model on a number of GPUs, before anything runs."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text

if TYPE_CHECKING:
    from dlo_lib.planner import Found, PlanRequest, Stack

console = Console()
_MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.3-70b")
"""Of the heat map, with the model that is planned."""


def plan(
    gpus: Annotated[int, typer.Option(help="GPUs of the run", min=1)],
    model: Annotated[str, typer.Option(help="name of a configuration")] = "llama-3.3-70b",
    site: Annotated[str, typer.Option(help="site: its GPUs and links")] = "jean-zay-h100",
    batch: Annotated[
        int | None, typer.Option(help="sequences in a step of all GPUs; default: 4 for each GPU", min=1)
    ] = None,
    seq: Annotated[int, typer.Option(help="tokens in a sequence", min=1)] = 4096,
    memory: Annotated[
        float | None, typer.Option(help="GiB of a GPU that a plan may take; default: all usable")
    ] = None,
    fused: Annotated[
        bool,
        typer.Option("--fused", help="with fused kernels; their time was not calibrated, their memory was"),
    ] = False,
    run: Annotated[
        Path | None, typer.Option(help="folder of a measured run on these GPUs, which fixes the constant")
    ] = None,
    rows: Annotated[int, typer.Option(help="plans to show", min=1)] = 8,
    row: Annotated[int, typer.Option(help="the plan that is explained and written, from 1", min=1)] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for the TOML file, the commands, the job script and the figures"),
    ] = None,
    account: Annotated[str, typer.Option(help="account of the job script")] = "",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="measure the memory of the explained plan, on fake tensors (minutes for 70B)"
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Search the best way to distribute a training over GPUs: time, MFU and memory of each plan.

    All times are predictions; the interval is shown with them. With --out, the files of the chosen plan are
    written: plan.toml for `python -m dlo_lib.train --config`, job.sh, and configurations of Megatron-LM and
    torchtitan.
    """
    from dlo_lib.cluster import site as find_site
    from dlo_lib.models import model_config
    from dlo_lib.planner import PlanRequest, search

    if seq > (most := model_config(model).max_positions):
        raise UserError(f"seq is {seq}: {model} has {most} positions; use at most that")
    limit = None if memory is None else round(memory * 2**30)
    nodes = find_site(site).nodes
    dtype = "bf16" if "bf16" in nodes.gpu.peak_flops else "fp16"
    request = PlanRequest(model, nodes, gpus, batch or 4 * gpus, seq, limit, fused=fused, dtype=dtype)
    found = search(request, None if run is None else stack_of_run(run, request))
    chosen = row - 1
    if chosen >= len(found.plans):
        raise UserError(f"row is {row}: {len(found.plans)} plans fit; use at most that")
    measured = {"measured_gib": measured_gib(found, chosen)} if measure else {}
    if as_json:
        print(json.dumps(as_data(found, rows) | measured, indent=1))
    else:
        _show(found, rows, chosen)
        for name, gib in measured.items():
            said = f"{name.replace('_gib', '')}: {gib:.1f} GiB, {found.memory[chosen] / 2**30:.1f} by formula"
            console.print(said, soft_wrap=True, highlight=False)
    if out is not None:
        write_files(found, chosen, out, site, account)
        if not as_json:
            console.print(f"The files of plan {row} are in {out}.", soft_wrap=True, highlight=False)


def _values(found: Found, row: int) -> dict[str, Any]:
    from dlo_lib.planner import simulated_step
    from dlo_lib.planner.explain import in_words

    low, high = found.interval(row)
    schedule = simulated_step(found, row)
    seconds, request = float(found.cost.seconds[row]), found.request
    return {
        "plan": in_words(found.plans, row),
        "seconds": seconds,
        "low": low,
        "high": high,
        "simulated_seconds": None if schedule is None else schedule.seconds,
        "mfu": float(found.cost.mfu[row]),
        "tokens_per_second": request.batch * request.seq / seconds,
        "memory_gib": float(found.memory[row] / 2**30),
        "too_close_to_the_best": found.too_close(0, row),
    }


def as_data(found: Found, rows: int) -> dict[str, Any]:
    """Return a search as JSON values: the request, the fastest plans, the Pareto front, why others lose, and
    what 1,000 steps of the best plan cost."""
    from dlo_lib.hardware import run_cost
    from dlo_lib.planner import explain, why_others_lose
    from dlo_lib.planner.write import train_options

    request, seconds = found.request, float(found.cost.seconds[0])
    cost = run_cost(request.nodes, request.gpus, 1000 * seconds / 3600)
    return {
        "model": str(request.model),
        "gpus": request.gpus,
        "gpu": request.nodes.gpu.name,
        "batch": request.batch,
        "seq": request.seq,
        "tried": found.tried,
        "fit": len(found.plans),
        "rows": [
            _values(found, one) | {"options": train_options(found, one)}
            for one in range(min(rows, len(found.plans)))
        ],
        "pareto": [_values(found, int(one)) for one in found.pareto],
        "others": why_others_lose(found),
        "explained": explain(found),
        "thousand_steps": {
            "gpu_hours": cost.gpu_hours,
            "kwh": cost.kwh,
            "co2_grams": cost.co2_grams,
            "price": cost.price,
        },
    }


def _show(found: Found, rows: int, chosen: int) -> None:
    from dlo_lib.planner import explain

    data = as_data(found, rows)
    request = found.request
    title = (
        f"{data['model']} on {request.gpus} {data['gpu']}, {request.batch} sequences of {request.seq} tokens"
    )
    table = Table("", "plan", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title=title)
    for name in ("s a step", "90 % interval", "MFU", "tokens/s", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(data["rows"], 1):
        table.add_row(
            f"{number}{'=' if one['too_close_to_the_best'] and number > 1 else ''}",
            one["plan"],
            f"{one['seconds']:.3g}",
            f"{one['low']:.3g} to {one['high']:.3g}",
            f"{100 * one['mfu']:.1f} %",
            f"{one['tokens_per_second']:,.0f}",
            f"{one['memory_gib']:.1f}",
        )
    console.print(table)
    lines = [
        f"{found.tried:,} candidates, {len(found.plans):,} are valid and fit. "
        "A row with = is too close to the first.",
        *_simulated(data["rows"]),
        *explain(found, chosen),
        *(f"{name}: {sentence}" for name, sentence in data["others"].items()),
    ]
    cost = data["thousand_steps"]
    carbon = "" if cost["co2_grams"] is None else f", {cost['co2_grams'] / 1000:.3g} kg CO2"
    price = "" if cost["price"] is None else f", price {cost['price']:.3g}"
    lines.append(f"1,000 steps: {cost['gpu_hours']:,.0f} GPU hours, {cost['kwh']:,.0f} kWh{carbon}{price}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _simulated(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line with the simulated time of the plans that have a pipeline, if there are any."""
    times = [
        f"plan {number} {one['simulated_seconds']:.3g} s"
        for number, one in enumerate(rows, 1)
        if one["simulated_seconds"] is not None
    ]
    return [f"With the schedule simulated on the stages as they are cut: {', '.join(times)}"] if times else []


def measured_gib(found: Found, row: int) -> float:
    """Return the peak of the first or the last rank of a plan, the larger one, by ``measure_memory``. A
    pipeline runs at most 4 micro-batches for each stage, because more would only repeat them.

    Raises:
        UserError: the model has experts with a capacity.
    """
    from dlo_lib.planner.plans import Checkpointing
    from dlo_lib.profiling import measure_memory

    request, plans = found.request, found.plans
    world, plan_of_row = int(plans.gpus[row]), plans.plan(row)
    most = 4 * plan_of_row.pp
    plan_of_row = replace(plan_of_row, micro_batches=min(most, plan_of_row.micro_batches))
    peaks = [
        measure_memory(
            str(request.model),
            int(plans.micro_batch[row]),
            request.seq,
            request.dtype,
            checkpointing=bool(plans.checkpointing[row] == Checkpointing.FULL),
            parallel=plan_of_row,
            world_size=world,
            rank=rank,
            kernels="fused" if plans.fused[row] else "eager",
        ).peak_bytes
        for rank in sorted({0, world - world // int(plans.pp[row])})
    ]
    return max(peaks) / 2**30


def write_files(found: Found, row: int, out: Path, site: str, account: str) -> None:
    """Write the files of a plan to the folder ``out``: plan.toml, train.txt, job.sh, megatron.txt,
    torchtitan.toml, plans.png and heat_map.png.

    Raises:
        UserError: the site refuses the job.
    """
    from dlo_lib import cluster
    from dlo_lib.cluster.script.work import options
    from dlo_lib.planner import plot_plans
    from dlo_lib.planner.heat_map import best_by_size, plot_heat_map
    from dlo_lib.planner.write import megatron_arguments, to_toml, torchtitan_config, train_options

    out.mkdir(parents=True, exist_ok=True)
    toml = (out / "plan.toml").resolve()
    write_text(toml, to_toml(found, row))
    write_text(
        out / "train.txt", "python -m dlo_lib.train " + " ".join(options(train_options(found, row))) + "\n"
    )
    write_text(out / "megatron.txt", "pretrain_gpt.py " + shlex.join(megatron_arguments(found, row)) + "\n")
    write_text(out / "torchtitan.toml", torchtitan_config(found, row))
    with contextlib.redirect_stdout(io.StringIO()):  # the announcement of the job
        script = cluster.submit(
            "dlo_lib.train", ["--config", str(toml)], gpus=found.request.gpus, site=site,
            account=account, dry_run=True,
        )  # fmt: skip
    write_text(out / "job.sh", str(script))
    others = [int(one) for one in found.pareto if one != row][:3]
    plot_plans(found, [row, *others]).savefig(out / "plans.png", dpi=120)
    request = found.request
    most = max(1, request.gpus // request.nodes.gpus_per_node)
    nodes = [1 << power for power in range(int(math.log2(most)) + 1)][-6:]
    models = [*dict.fromkeys((*_MODELS, str(request.model)))]
    mfu, memory = best_by_size(request, models, nodes, found.stack)
    gpus = f"nodes of {request.nodes.gpus_per_node} {request.nodes.gpu.name}"
    title = f"Best plan, predicted: {gpus}, {request.batch} sequences of {request.seq} tokens"
    plot_heat_map(models, nodes, mfu, memory, title).savefig(out / "heat_map.png", dpi=120)


def stack_of_run(folder: Path, request: PlanRequest) -> Stack:
    """Return the stack whose prediction of a measured run is its time: the median of ``step_seconds`` in its
    metrics.

    Raises:
        UserError: the folder has no configuration or no metrics, or the run is none of a Llama on GPUs.
    """
    import statistics

    from dlo_lib.parallel.plan import ParallelPlan
    from dlo_lib.planner import LIBRARY, ModelSizes, Plans
    from dlo_lib.planner.calibration import anchored_by
    from dlo_lib.planner.plans import Checkpointing
    from dlo_lib.train import TrainConfig, read_metrics

    try:
        config = TrainConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
        metrics = read_metrics(folder)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder} is no folder of a run: {error}") from error
    if not metrics:
        raise UserError(f"{folder} has no metrics yet: give a run that has trained some steps")
    last = metrics[-1]
    seconds = statistics.median(one.step_seconds for one in metrics)
    model_ranks = max(config.pp, 1) * config.cp * config.tp
    copies = round(last.tokens / last.step / (config.sequences * config.accumulation * config.seq))
    parallel: ParallelPlan = config.plan(max(1, copies) * model_ranks, request.nodes.gpus_per_node)
    plans = Plans.of_plans(
        [parallel],
        micro_batch=config.sequences,
        micro_batches=config.accumulation,
        checkpointing=Checkpointing.FULL if config.checkpointing else Checkpointing.NONE,
        fused=config.kernels.value == "fused",
        compiled=config.compile,
    )
    dtype = "bf16" if config.precision.value == "bf16" else config.precision.value
    return anchored_by(LIBRARY, ModelSizes.of(config.model), plans, config.seq, request.nodes, seconds, dtype)

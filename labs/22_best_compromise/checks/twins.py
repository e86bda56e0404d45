"""What the checks compare with: simulated tables, messages counted one by one, and the planner."""

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.checks.twins import twin
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.planner import ModelSizes, PlanRequest, plan_memory, search
from dlo_lib.planner.calibration import library_stack
from dlo_lib.planner.rated import in_knobs, plans_of
from dlo_lib.profiling import Part


def table(pp: int, micro_batches: int, chunks: int = 1):
    """The table of 1F1B, or of interleaved 1F1B."""
    if chunks > 1:
        return schedules.interleaved(pp, micro_batches, chunks)
    return schedules.one_f_one_b(pp, micro_batches)


@twin
def makespan(pp: int, micro_batches: int, chunks: int = 1) -> float:
    """The time of a step if a micro-batch takes one unit on a rank: a third is forward."""
    third = 1 / (3 * chunks)
    return simulate(table(pp, micro_batches, chunks), Costs(third, third, third)).makespan


@twin
def in_flight(pp: int, micro_batches: int, chunks: int, rank: int) -> float:
    """The most micro-batches that wait on a rank, each for all of its blocks."""
    return simulate(table(pp, micro_batches, chunks)).in_flight()[rank] / chunks


def ring(elements: float, ranks: int, passes: int) -> float:
    """What a rank sends, message by message; an all-reduce passes the ring twice, its halves once."""
    return sum(elements / ranks for _ in range(passes) for _ in range(ranks - 1))


def owned_by(config: LlamaConfig, plan: dict) -> float:
    """The parameters of the first or the last rank, by the library's count."""
    one, tables = parameters_by_part(replace(config, num_layers=1)), 2 if plan["pp"] == 1 else 1
    block = one["attention"] + one["mlp"] + one["norm"] - config.hidden
    return (config.num_layers // plan["pp"] * block + tables * one["embedding"]) / plan["tp"]


@twin
def kept_by(config: LlamaConfig, plan: dict, batch: int, seq: int) -> float:
    """Bytes that a block keeps of a micro-batch: what twice the blocks add, by the planner."""
    alone, held = plans_of(plan | {"pp": 1, "chunks": 1}, batch), []
    for layers in (config.num_layers, 2 * config.num_layers):
        sizes = ModelSizes.of(replace(config, num_layers=layers))
        held.append(float(plan_memory(sizes, alone, seq).parts[Part.ACTIVATIONS][0]))
    return (held[1] - held[0]) / config.num_layers


@twin
def planned(config: LlamaConfig, plan: dict, batch: int, seq: int, last: bool) -> dict[str, float]:
    """The planner's parts of the memory of a rank, by the values of ``Part``."""
    memory = plan_memory(ModelSizes.of(config), plans_of(plan, batch), seq, last=last)
    return {part.value: float(held[0]) for part, held in memory.parts.items()}


# -- machines and requests


def request_of(case: dict) -> PlanRequest:
    """The planner's request of a case that :func:`drawn_case` has drawn."""
    name, per_node, fabric, ports, nvlink, gpus = case["machine"]
    nodes = GpuNodes(gpu(name), per_node, link(fabric), ports, nvlink)
    return PlanRequest(case["config"], nodes, gpus, case["batch"], case["seq"], case["cap"])


def numbers(request: PlanRequest) -> dict[str, float]:
    """A cluster as the dict of the lab."""
    nodes, stack = request.nodes, library_stack(request.nodes)
    reached = 0.75 * stack.matmul / stack.slowdown  # the rest: kernels between products, parts of tiles
    return {
        "gpus": request.gpus,
        "gpus_per_node": nodes.gpus_per_node,
        "flops": nodes.gpu.peak("bf16") * reached,
        "inside": nodes.inside * stack.links,
        "between": nodes.between * stack.links,
    }


@twin
def least_seconds(case: dict) -> float:
    """The planner's fastest plan that the seven knobs can express."""
    found = search(request_of(case))
    return float(found.cost.seconds[in_knobs(found.plans)][0])


def drawn_config(t, **fixed) -> LlamaConfig:
    """A small model with all sizes different, not tied."""
    heads, kv_heads = t.choice([(8, 4), (12, 4), (16, 8)])
    sizes = {
        "vocab_size": 8 * (2 * t.integer(30, 45) + 1),  # unlike all other sizes
        "hidden": 64 * t.integer(3, 6),
        "intermediate": 32 * t.integer(20, 30),
        "num_layers": 4 * t.integer(2, 4),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 16 * t.integer(1, 2),
    }
    return LlamaConfig(**(sizes | fixed))


def drawn_plan(t, **fixed) -> dict:
    """A plan; what is not fixed is drawn."""
    plan = {
        "pp": t.choice([2, 4]),
        "tp": t.choice([2, 4]),
        "dp": t.choice([2, 4, 8]),
        "micro_batch": t.integer(1, 3),
        "chunks": 1,
        "sharded": t.choice([False, True]),
        "checkpointing": t.choice([False, True]),
    }
    return plan | fixed


def batch_of(t, plan: dict) -> int:
    """A batch of more micro-batches than stages, a multiple of their number."""
    return plan["dp"] * plan["micro_batch"] * plan["pp"] * t.integer(2, 4)


def drawn_cluster(t, per_node: int) -> dict[str, float]:
    """A cluster with rates that are round in no unit."""
    inside = t.uniform(1e11, 4e11)
    return {
        "gpus": 8 * per_node,
        "gpus_per_node": per_node,
        "flops": t.uniform(1e14, 6e14),
        "inside": inside,
        "between": inside / t.uniform(9, 12),
    }


def drawn_rank(t, plan: dict, **sizes) -> tuple:
    """A small model, the plan, a batch and a length."""
    return drawn_config(t, **sizes), plan, batch_of(t, plan), 64 * t.integer(1, 6)


def drawn_step(t, per_node: int = 4, **fixed) -> tuple:
    """A small model, a plan, a batch, a length and a cluster."""
    plan = drawn_plan(t, **fixed)
    config = drawn_config(t, num_layers=plan["pp"] * plan["chunks"] * t.integer(2, 4))
    return config, plan, batch_of(t, plan), 64 * t.integer(1, 3), drawn_cluster(t, per_node)


KINDS = ("few sequences", "slow links", "fast links", "no NVLink", "little memory")


def drawn_case(t, kind: str) -> dict:
    """A large model on a cluster on which ``kind`` decides what is best."""
    hidden = 1024 * t.integer(5, 10)
    config = LlamaConfig(
        vocab_size=1000 * t.integer(16, 128),
        hidden=hidden,
        intermediate=hidden * t.choice([11, 13, 14]) // 4,
        num_layers=8 * t.integer(5, 10),
        num_heads=hidden // 128,
        num_kv_heads=8,
        head_dim=128,
    )
    per_node, gpus = t.choice([4, 8]), t.choice([64, 128])
    known, large, fast = t.choice(["a100-80", "h100-80"]), t.choice(["a100-80", "h200"]), t.choice([2, 4])
    card, fabric, ports, nvlink, sequences = {
        "few sequences": (known, t.choice(["hdr", "ndr"]), per_node // 2, True, 0.5),
        "slow links": (known, t.choice(["edr", "hdr"]), 1, True, 4),
        "fast links": (large, "ndr", per_node, True, fast),
        "little memory": (known, "hdr", per_node, True, 1),
        "no NVLink": (known, "edr", per_node // 2, False, 2),
    }[kind]
    part = t.uniform(0.45, 0.6) if kind == "little memory" else t.uniform(0.7, 1.0)
    return {
        "config": config,
        "machine": (card, per_node, fabric, ports, nvlink, gpus),
        "batch": int(gpus * sequences),
        "seq": t.choice([2048, 4096]),
        "cap": int(gpu(card).usable_bytes * part),
    }

"""What the checks compare with: simulated tables, messages counted one by one, a model without storage, and
the planner."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from dlo_lib.grading.checks.twins import twin
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.models import Llama, LlamaConfig
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


@twin
def parameters_of(config: LlamaConfig) -> dict[str, int]:
    """Parameters of a block and of a table, counted on a model without storage."""
    model = Llama(replace(config, num_layers=1), device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = [size for size in sizes.values() if size == config.vocab_size * config.hidden]
    return {"block": sum(sizes.values()) - sum(tables) - config.hidden, "table": tables[0]}


@twin
def forward_flops(config: LlamaConfig, seq: int) -> float:
    """FLOPs of the forward of a sequence, counted on a model without storage: two for each weight of a linear
    layer and token, and the two products of each head."""
    layers = [module for module in Llama(config, device="meta").modules() if isinstance(module, nn.Linear)]
    linear = sum(2 * seq * layer.weight.numel() for layer in layers)
    heads = sum(2 * 2 * seq * seq * config.head_dim for _ in range(config.num_layers * config.num_heads))
    return float(linear + heads)


@twin
def kept_by_a_block(config: LlamaConfig, plan: dict, batch: int, seq: int) -> float:
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


@twin
def numbers(name: str, per_node: int, fabric: str, ports: int, nvlink: bool, gpus: int) -> dict[str, float]:
    """A cluster as the dict of the lab."""
    nodes = GpuNodes(gpu(name), per_node, link(fabric), ports, nvlink)
    stack = library_stack(nodes)
    reached = 0.75 * stack.matmul / stack.slowdown  # the rest: kernels between products, parts of tiles
    return {
        "gpus": gpus,
        "gpus_per_node": per_node,
        "flops": nodes.gpu.peak("bf16") * reached,
        "inside": nodes.inside * stack.links,
        "between": nodes.between * stack.links,
    }


def request_of(case: dict) -> PlanRequest:
    """The planner's request of a case that :func:`drawn_case` has drawn."""
    name, per_node, fabric, ports, nvlink, gpus = case["machine"]
    nodes = GpuNodes(gpu(name), per_node, link(fabric), ports, nvlink)
    return PlanRequest(case["config"], nodes, gpus, case["batch"], case["seq"], case["cap"])


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
    card, fabric, ports, nvlink, sequences = {
        "few sequences": (
            t.choice(["a100-80", "h100-80"]),
            t.choice(["hdr", "ndr"]),
            per_node // 2,
            True,
            0.5,
        ),
        "slow links": (t.choice(["a100-80", "h100-80"]), t.choice(["edr", "hdr"]), 1, True, 4),
        "fast links": (t.choice(["a100-80", "h200"]), "ndr", per_node, True, t.choice([2, 4])),
        "little memory": (t.choice(["a100-80", "h100-80"]), "hdr", per_node, True, 1),
        "no NVLink": (t.choice(["a100-80", "h100-80"]), "edr", per_node // 2, False, 2),
    }[kind]
    # heads that eight ranks can share
    config = replace(config, num_heads=8 * math.ceil(config.num_heads / 8))
    return {
        "config": config,
        "machine": (card, per_node, fabric, ports, nvlink, gpus),
        "batch": int(gpus * sequences),
        "seq": t.choice([2048, 4096]),
        "cap": int(
            gpu(card).usable_bytes
            * (t.uniform(0.45, 0.6) if kind == "little memory" else t.uniform(0.7, 1.0))
        ),
    }

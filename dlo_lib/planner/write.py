"""The files of a chosen plan: the options of the trainer and their TOML file, and the same plan as options of
Megatron-LM and as a configuration of torchtitan.

Options of Megatron-LM: its ``arguments.py``.
torchtitan: ``[parallelism]`` of its ``job_config.py``, where ``-1`` means all remaining ranks.
"""

from __future__ import annotations

from dlo_lib.planner.plans import CONTEXTS, DEGREES, SCHEDULES, Checkpointing
from dlo_lib.planner.search import Found

_TORCHTITAN = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "afab": "GPipe"}


def train_options(found: Found, row: int = 0) -> dict[str, str | int | bool]:
    """Return the options of ``python -m dlo_lib.train`` for a plan, by the names of ``TrainConfig``."""
    p, request = found.plans, found.request
    stage = int(p.stage[row])
    options: dict[str, str | int | bool] = {
        "model": str(request.model),
        "parallel": ("none" if p.gpus[row] == 1 else "ddp", "zero1", "zero2", "fsdp")[stage],
        "batch": int(p.micro_batch[row]),
        "accumulation": int(p.micro_batches[row]),
        "seq": request.seq,
        "precision": request.dtype,
        "kernels": "fused" if p.fused[row] else "eager",
        "checkpointing": bool(p.checkpointing[row] == Checkpointing.FULL),
        "compile": bool(p.compiled[row]),
    }
    for name in DEGREES:
        if (degree := int(getattr(p, name)[row])) > 1:
            options[name] = degree
    if p.sequence_parallel[row]:
        options["sequence_parallel"] = True
    if p.cp[row] > 1:
        options["context_kind"] = CONTEXTS[p.context[row]].value
    if p.pp[row] > 1:
        options["schedule"] = SCHEDULES[p.schedule[row]].value
    return options


def to_toml(found: Found, row: int = 0) -> str:
    """Return the file that ``python -m dlo_lib.train --config FILE`` reads."""
    lines = ["# Options of `python -m dlo_lib.train`; those of its command line take precedence."]
    lines.append(f"# Predicted: {found.cost.seconds[row]:.3g} s a step on {found.request.gpus} GPUs.")
    for name, value in train_options(found, row).items():
        shown = str(value).lower() if isinstance(value, bool) else value
        lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {shown}")
    return "\n".join(lines) + "\n"


def megatron_arguments(found: Found, row: int = 0) -> list[str]:
    """Return the arguments of Megatron-LM's ``pretrain_gpt.py`` for a plan."""
    p, sizes, request = found.plans, found.request.sizes, found.request
    values = {
        "--tensor-model-parallel-size": int(p.tp[row]),
        "--pipeline-model-parallel-size": int(p.pp[row]),
        "--context-parallel-size": int(p.cp[row]),
        "--expert-model-parallel-size": int(p.ep[row]),
        "--num-layers": sizes.layers,
        "--hidden-size": sizes.hidden,
        "--ffn-hidden-size": sizes.intermediate,
        "--num-attention-heads": sizes.heads,
        "--num-query-groups": sizes.kv_heads,
        "--seq-length": request.seq,
        "--micro-batch-size": int(p.micro_batch[row]),
        "--global-batch-size": request.batch,
    }
    if p.pp[row] > 1 and p.chunks[row] > 1:
        layers = max(1, sizes.layers // int(p.pp[row] * p.chunks[row]))
        values["--num-layers-per-virtual-pipeline-stage"] = layers
    if (moe := sizes.moe) is not None:
        values["--num-experts"], values["--moe-router-topk"] = moe.num_experts, moe.top_k
        values["--moe-ffn-hidden-size"] = moe.intermediate
        if moe.shared_intermediate:
            values["--moe-shared-expert-intermediate-size"] = moe.shared_intermediate
    words = [word for name, value in values.items() for word in (name, str(value))]
    if moe is not None and moe.every > 1:  # the last of each group of blocks has experts
        words += ["--moe-layer-freq", f"([0]*{moe.every - 1}+[1])*{sizes.layers // moe.every}"]
    words += ["--swiglu", "--group-query-attention", "--bf16"]
    words += ["--sequence-parallel"] * bool(p.sequence_parallel[row])
    # Its FSDP2 refuses a pipeline: the nearest there is to distribute the states.
    fsdp = int(p.stage[row]) == 3 and p.pp[row] == 1
    words += ["--use-torch-fsdp2"] if fsdp else ["--use-distributed-optimizer"] * (int(p.stage[row]) > 0)
    if p.checkpointing[row] == Checkpointing.FULL:
        full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        words += full.split()
    return words


def torchtitan_config(found: Found, row: int = 0) -> str:
    """Return the sections of a torchtitan configuration that a plan decides.

    torchtitan shards by FSDP alone: it refuses whole copies beside another degree ("DDP has not supported
    > 1D parallelism"), and has no ZeRO-1 or ZeRO-2. The nearest that it runs is written, with a comment:
    shards, whose parameters stay gathered between forward and backward.
    """
    p, request = found.plans, found.request
    schedule = SCHEDULES[p.schedule[row]].value
    mode = "full" if p.checkpointing[row] == Checkpointing.FULL else "none"
    # Without a pipeline, it runs local_batch_size in one forward, and accumulates up to global_batch_size.
    local = p.micro_batch[row] * (p.micro_batches[row] if p.pp[row] > 1 else 1)
    replicate, shard, stage = int(p.dp_replicate[row]), int(p.dp_shard[row]), int(p.stage[row])
    nearest = stage in (1, 2) or (stage == 0 and replicate > 1 and p.gpus[row] > replicate)
    if stage == 0 and nearest:
        replicate, shard = 1, replicate * shard
    lines = [
        "[training]",
        f"local_batch_size = {int(local)}",
        f"global_batch_size = {request.batch}",
        f"seq_len = {request.seq}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {shard}",
        f"tensor_parallel_degree = {int(p.tp[row])}",
        f"context_parallel_degree = {int(p.cp[row])}",
        f"pipeline_parallel_degree = {int(p.pp[row])}",
        f"expert_parallel_degree = {int(p.ep[row])}",
    ]
    if nearest:
        why = f"ZeRO-{stage}" if stage else "whole copies beside another degree"
        lines.append(f"# torchtitan has no {why}: the nearest is FSDP that keeps the gathered parameters")
        lines.append('fsdp_reshard_after_forward = "never"')
    if p.pp[row] > 1:
        lines.append(f'pipeline_parallel_schedule = "{_TORCHTITAN.get(schedule, schedule)}"')
        lines.append(f"pipeline_parallel_microbatch_size = {int(p.micro_batch[row])}")
    return "\n".join([*lines, "", "[activation_checkpoint]", f'mode = "{mode}"', ""])

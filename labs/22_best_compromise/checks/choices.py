"""The visible checks of the chosen plan, which the planner rates, and of its configurations."""

from __future__ import annotations

import math

from dlo_lib.grading.checks.contract import check
from dlo_lib.planner import rated

from .plans import said
from .twins import KINDS, batch_of, drawn_case, drawn_config, drawn_plan, least_seconds, numbers, request_of

GIB = 2**30
NUMBERS = ("pp", "tp", "dp", "micro_batch", "chunks", "sharded", "checkpointing")

# -- choose


def chosen(student, t, case: dict):
    """The student's plan for a case, as the planner rates it."""
    cluster = numbers(*case["machine"])
    plan = student.choose(case["config"], cluster, case["batch"], case["seq"], case["cap"])
    t.that(
        type(plan) is dict, "choose(...) should return a plan, a dict of seven numbers, not {plan}", plan=plan
    )
    whole = all(type(plan.get(name)) in (int, bool) for name in NUMBERS)
    t.that(
        whole,
        "{plan} should have whole numbers and True or False for: {names}",
        plan=plan,
        names=", ".join(NUMBERS),
    )
    return plan, rated(request_of(case), plan)


@check("choose", points=2, seconds=20)
def check_valid(student, t):
    "The plan is valid and fits under the cap"
    for kind in KINDS:
        case = drawn_case(t, kind)
        plan, found = chosen(student, t, case)
        message = "on {gpus} GPUs with {batch} sequences the plan {plan} is not valid: {why}"
        values = {"gpus": case["machine"][-1], "batch": case["batch"], "plan": said(plan)}
        t.that(not found.refused, message, why=found.refused, **values)
        message = (
            "on {gpus} GPUs with {batch} sequences the plan {plan} needs {needs:.1f} GiB, the cap is "
            "{cap:.1f} GiB"
        )
        t.that(
            found.memory <= case["cap"], message, needs=found.memory / GIB, cap=case["cap"] / GIB, **values
        )


def mean_of(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def within(student, t, most: float) -> None:
    """The geometric mean of the time over the planner's best, on a case of each kind, is at most ``most``."""
    ratios = []
    for kind in KINDS:
        case = drawn_case(t, kind)
        found = chosen(student, t, case)[1]
        fits = not found.refused and found.memory <= case["cap"]
        t.that(fits, "not tested yet: a plan is not valid or does not fit, see the first check")
        ratios.append(found.seconds / least_seconds(case))
    message = (
        "your steps take {mean:.2f} times the planner's best, at most {most} earns these "
        "points. By case: few sequences {few:.2f}, slow links {slow:.2f}, fast links {fast:.2f}, no NVLink "
        "{pcie:.2f}, little memory {little:.2f}"
    )
    values = dict(zip(("few", "slow", "fast", "pcie", "little"), ratios))
    t.that(mean_of(ratios) <= most, message, mean=mean_of(ratios), most=most, **values)


@check("choose", points=2, seconds=20)
def check_first_step(student, t):
    "At most 2 times the planner's best, in the mean of five cases"
    within(student, t, 2.0)


@check("choose", points=3, seconds=20)
def check_second_step(student, t):
    "At most 1.3 times the planner's best"
    within(student, t, 1.3)


@check("choose", points=3, seconds=20)
def check_last_step(student, t):
    "At most 1.12 times the planner's best"
    within(student, t, 1.12)


# -- configs: the arguments are read back into a plan, as the trainers do it


def given(t, got: object, name: str, what: str, kinds: tuple[type, ...] = (int,)) -> object:
    t.that(type(got) is dict, "{what} should be a dict, not {got}", what=what, got=got)
    good = name in got and type(got[name]) in kinds
    t.that(good, "{what} should have {name}", what=what, name=name)
    return got[name]


def drawn_layout(t, **fixed) -> tuple[dict, object, int]:
    plan = drawn_plan(t, **fixed)
    config = drawn_config(t, num_layers=plan["pp"] * plan["chunks"] * t.integer(2, 5))
    return plan, config, batch_of(t, plan)


def compared(t, got: dict, want: dict, what: str) -> None:
    for name, right in want.items():
        message = "{what}, read by the trainer, gives {name} {got}, the plan has {want}"
        t.that(got[name] == right, message, what=what, name=name, got=got[name], want=right)


def read_megatron(t, got: object, gpus: int, layers: int) -> dict:
    """The plan that Megatron-LM makes of its arguments."""
    what = "megatron_arguments(...)"

    def number(name: str) -> int:
        value = given(t, got, name, what)
        t.that(value > 0, "{name} is {value}", name=name, value=value)
        return value

    tp, pp = number("--tensor-model-parallel-size"), number("--pipeline-model-parallel-size")
    virtual = "--num-layers-per-virtual-pipeline-stage"
    dp = gpus // (tp * pp)
    return {
        "pp": pp,
        "tp": tp,
        "dp": dp,
        "micro_batch": number("--micro-batch-size"),
        "batch": number("--global-batch-size"),
        "chunks": layers // pp // number(virtual) if virtual in got else 1,
        "checkpointing": got.get("--recompute-granularity") == "full",
    }


@check("configs", points=1)
def check_megatron(student, t):
    "Megatron-LM reads the degrees and the batch of the plan"
    for chunks in (1, 2):
        plan, config, batch = drawn_layout(t, chunks=chunks)
        got = student.megatron_arguments(plan, config, batch)
        read = read_megatron(t, got, plan["pp"] * plan["tp"] * plan["dp"], config.num_layers)
        want = {name: plan[name] for name in ("pp", "tp", "dp", "micro_batch", "chunks")}
        compared(
            t,
            read,
            want | {"batch": batch, "checkpointing": plan["checkpointing"]},
            "megatron_arguments(...)",
        )


@check("configs", points=1)
def check_switches(student, t):
    "The switches of Megatron-LM that apply, and no others"
    for pp, tp in ((1, 4), (4, 1), (2, 2)):
        for switch in (False, True):
            plan, config, batch = drawn_layout(t, pp=pp, tp=tp, sharded=switch, checkpointing=switch)
            got = student.megatron_arguments(plan, config, batch)
            given(t, got, "--micro-batch-size", "megatron_arguments(...)")
            wanted = {
                "--sequence-parallel": tp > 1,
                "--use-torch-fsdp2": switch and pp == 1,
                "--use-distributed-optimizer": switch and pp > 1,
                "--recompute-granularity": switch,
                "--recompute-method": switch,
                "--recompute-num-layers": switch,
                "--num-layers-per-virtual-pipeline-stage": False,
            }
            for name, applies in wanted.items():
                message = "for {plan}, {name} should be " + ("there" if applies else "absent")
                t.that((name in got) == applies, message, plan=said(plan), name=name)


@check("configs", points=1)
def check_torchtitan(student, t):
    "torchtitan reads the degrees of the plan"
    what = "torchtitan_options(...)"
    for sharded, chunks in ((True, 2), (False, 1)):
        plan, _, batch = drawn_layout(t, sharded=sharded, chunks=chunks)
        seq = 64 * t.integer(2, 9)
        got = student.torchtitan_options(plan, batch, seq)
        kinds = {"shard": "data_parallel_shard", "replicate": "data_parallel_replicate"}
        kinds |= {"tp": "tensor_parallel", "pp": "pipeline_parallel"}
        read = {name: given(t, got, f"parallelism.{kind}_degree", what) for name, kind in kinds.items()}
        read["sequence"] = given(t, got, "training.seq_len", what)
        read["schedule"] = given(t, got, "parallelism.pipeline_parallel_schedule", what, (str,))
        read["mode"] = given(t, got, "activation_checkpoint.mode", what, (str,))
        want = {"shard": plan["dp"] if sharded else 1, "replicate": 1 if sharded else plan["dp"]}
        want |= {"tp": plan["tp"], "pp": plan["pp"], "sequence": seq}
        want["schedule"] = "Interleaved1F1B" if chunks > 1 else "1F1B"
        want["mode"] = "full" if plan["checkpointing"] else "none"
        compared(t, read, want, what)


@check("configs", points=1)
def check_local_batch(student, t):
    "torchtitan counts micro-batches by its local batch"
    what = "torchtitan_options(...)"
    for pp in (t.choice([2, 4]), 1):
        plan, _, batch = drawn_layout(t, pp=pp)
        got = student.torchtitan_options(plan, batch, 64 * t.integer(2, 9))
        local, whole = (given(t, got, f"training.{name}_batch_size", what) for name in ("local", "global"))
        size = "parallelism.pipeline_parallel_microbatch_size"
        micro = given(t, got, size, what) if pp > 1 else local
        t.that((size in got) == (pp > 1), "{size} is there only with a pipeline", size=size)
        message = (
            "torchtitan accumulates {times} times for a global batch of {whole}: with {pp} stages it needs "
            "local_batch_size {right}"
        )
        right = batch // plan["dp"] if pp > 1 else plan["micro_batch"]
        values = {"times": whole / max(local * plan["dp"], 1), "whole": whole, "pp": pp, "right": right}
        t.that(local == right and whole == batch, message, **values)
        t.that(
            micro == plan["micro_batch"],
            "a micro-batch has {micro} sequences, not {right}",
            micro=micro,
            right=plan["micro_batch"],
        )

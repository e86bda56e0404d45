"""The visible checks of the chosen plan, which the planner rates, and of its configurations."""

from __future__ import annotations

from statistics import geometric_mean

from dlo_lib.grading.checks.contract import check
from dlo_lib.planner.rated import COUNTS, SWITCHES, rated

from .plans import said
from .twins import KINDS, batch_of, drawn_case, drawn_config, drawn_plan, least_seconds, numbers, request_of

GIB = 2**30
NUMBERS = (*COUNTS, *SWITCHES)

# -- choose


def chosen(student, t, case: dict):
    """The student's plan for a case, as the planner rates it."""
    request = request_of(case)
    plan = student.choose(case["config"], numbers(request), case["batch"], case["seq"], case["cap"])
    message = "choose(...) should return a plan, a dict of seven numbers, not {plan}"
    t.that(type(plan) is dict, message, plan=plan)
    whole = all(type(plan.get(name)) in (int, bool) for name in NUMBERS)
    message = "{plan} should have whole numbers and True or False for: {names}"
    t.that(whole, message, plan=plan, names=", ".join(NUMBERS))
    return plan, rated(request, plan)


@check("choose", points=2, seconds=20)
def check_valid(student, t):
    "The plan is valid and fits under the cap"
    for kind in KINDS:
        case = drawn_case(t, kind)
        plan, found = chosen(student, t, case)
        message = "on {gpus} GPUs with {batch} sequences the plan {plan} is not valid: {why}"
        values = {"gpus": case["machine"][-1], "batch": case["batch"], "plan": said(plan)}
        t.that(not found.refused, message, why=found.refused, **values)
        message = "on {gpus} GPUs the plan {plan} needs {needs:.1f} GiB, the cap is {cap:.1f} GiB"
        values |= {"needs": found.memory / GIB, "cap": case["cap"] / GIB}
        t.that(found.memory <= case["cap"], message, **values)


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
    mean = geometric_mean(ratios)
    t.that(mean <= most, message, mean=mean, most=most, **values)


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


def read_megatron(t, got: object, plan: dict, layers: int) -> dict:
    """The plan that Megatron-LM makes of its arguments, on as many GPUs."""
    names = {"pp": "--pipeline-model-parallel-size", "tp": "--tensor-model-parallel-size"}
    names |= {"micro_batch": "--micro-batch-size", "batch": "--global-batch-size"}
    what, virtual = "megatron_arguments(...)", "--num-layers-per-virtual-pipeline-stage"
    read = {key: given(t, got, name, what) for key, name in names.items()}
    blocks = given(t, got, virtual, what) if virtual in got else layers // plan["pp"]
    t.that(min(*read.values(), blocks) > 0, "a number of {got} is not above 0", got=got)
    read["dp"] = plan["pp"] * plan["tp"] * plan["dp"] // (read["pp"] * read["tp"])
    read["chunks"] = layers // read["pp"] // blocks
    return read | {"checkpointing": got.get("--recompute-granularity") == "full"}


@check("configs", points=1)
def check_megatron(student, t):
    "Megatron-LM reads the degrees and the batch of the plan"
    for chunks in (1, 2):
        plan, config, batch = drawn_layout(t, chunks=chunks)
        got = student.megatron_arguments(plan, config, batch)
        read = read_megatron(t, got, plan, config.num_layers)
        compared(t, read, {name: (plan | {"batch": batch})[name] for name in read}, "megatron_arguments(...)")


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
                "--num-layers-per-virtual-pipeline-stage": False,
            } | {f"--recompute-{name}": switch for name in ("granularity", "method", "num-layers")}
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
        forms = {"shard": "data_parallel_shard", "replicate": "data_parallel_replicate"}
        forms |= {"tp": "tensor_parallel", "pp": "pipeline_parallel"}
        names = {key: f"parallelism.{form}_degree" for key, form in forms.items()}
        names |= {"sequence": "training.seq_len", "schedule": "parallelism.pipeline_parallel_schedule"}
        names["mode"] = "activation_checkpoint.mode"
        want = {"shard": plan["dp"] if sharded else 1, "replicate": 1 if sharded else plan["dp"]}
        want |= {"tp": plan["tp"], "pp": plan["pp"], "sequence": seq}
        want["schedule"] = "Interleaved1F1B" if chunks > 1 else "1F1B"
        want["mode"] = "full" if plan["checkpointing"] else "none"
        read = {key: given(t, got, name, what, (type(want[key]),)) for key, name in names.items()}
        compared(t, read, want, what)


@check("configs", points=1)
def check_local_batch(student, t):
    "torchtitan counts micro-batches by its local batch"
    what, size = "torchtitan_options(...)", "parallelism.pipeline_parallel_microbatch_size"
    for pp in (t.choice([2, 4]), 1):
        plan, _, batch = drawn_layout(t, pp=pp)
        got = student.torchtitan_options(plan, batch, 64 * t.integer(2, 9))
        local, whole = (given(t, got, f"training.{name}_batch_size", what) for name in ("local", "global"))
        micro = given(t, got, size, what) if pp > 1 else local
        t.that((size in got) == (pp > 1), "{size} is there only with a pipeline", size=size)
        message = (
            "with {pp} stages torchtitan needs local_batch_size {right}, not {local}, of {whole} sequences"
        )
        right = batch // plan["dp"] if pp > 1 else plan["micro_batch"]
        good = local == right and whole == batch
        t.that(good, message, pp=pp, right=right, local=local, whole=whole)
        right, message = plan["micro_batch"], "a micro-batch has {micro} sequences, not {right}"
        t.that(micro == right, message, micro=micro, right=right)

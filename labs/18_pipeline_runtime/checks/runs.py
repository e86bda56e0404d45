"""The visible checks of messages, of the loop on real ranks, of weight stashing and of pipelines side by
side."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Nudge, Run, check
from dlo_lib.grading.checks.schedules import read_table
from dlo_lib.labkit.compare import double, is_near, near, same, wrong_if
from dlo_lib.labkit.memory import MIB
from dlo_lib.labkit.traffic import uses_what_arrives
from dlo_lib.parallel.pipeline.schedules import afab, one_f_one_b
from dlo_lib.parallel.pipeline.table import ActionKind, B, F, I, Schedule, W, in_a_loop

from . import cases
from .cases import SENDS, Rows
from .scenarios import neighbours, whole_rank
from .twins import IGNORED, asynchronous_twin, whole_step

# tensors of an activation that rank 0, 1 and 2 of 3 may hold beside the inputs of the batch
LIMITS = (8, 9, 7)

# -- 4 · the order of messages


def written(student, t, rows: Rows) -> Schedule:
    """Return the student's rows with messages."""
    kinds = frozenset(ActionKind) - {I, W}
    micro_batches = sum(cell.startswith("0F") for cell in rows[0])
    return read_table(
        t, student.with_messages(rows), in_a_loop(len(rows)), micro_batches, "with_messages(rows)", kinds
    )


def stuck(student, t, rows: Rows) -> list[str]:
    """Return where ranks wait forever, and why; empty if none does."""
    schedule = written(student, t, rows)
    passed = sum(action.kind not in (F, B) for row in schedule.rows for action in row)
    wanted = 4 * schedule.micro_batches * (len(rows) - 1)  # two directions, a send and a receive
    message = (
        "with {ranks} ranks there are {got} sends and receives, but {want} are needed: every message must "
        "be in the rows"
    )
    t.that(passed == wanted, message, ranks=len(rows), got=passed, want=wanted)
    left = cases.stuck_at(schedule.rows)
    return cases.why_stuck(schedule.rows, left) if left else []


def joined(name: str, lines: list[str]) -> tuple[str, dict[str, str]]:
    """Return a template of these lines, and its values: a long value would be cut in the message."""
    values = {f"{name}{number}": line for number, line in enumerate(lines)}
    return " | ".join("{" + key + "}" for key in values), values


@check("order", points=2)
def check_each_message_once(student, t):
    "Each message is sent once, after its data is computed, and received once, before its use"
    for rows in cases.order_cases(t):
        schedule = written(student, t, rows)
        for rank, (row, plain) in enumerate(zip(schedule.rows, rows)):
            computed = [str(action) for action in row if action.kind in (F, B)]
            message = "the computations of rank {rank} are {got} instead of {want}: only add messages"
            t.that(computed == plain, message, rank=rank, got=computed, want=plain)
            passed = Counter(action for action in row if action.kind not in (F, B))
            wanted = cases.messages_of(len(rows), schedule.micro_batches, rank)
            values = {"rank": rank, "ranks": len(rows), "got": passed.total(), "want": len(wanted)}
            message = (
                "rank {rank} of {ranks} has {got} messages, but {want} are needed (the first rank receives "
                "no activations, the last sends none)"
            )
            t.that(passed == Counter(wanted), message, **values)
            place = {action: at for at, action in enumerate(row)}
            for action in wanted:
                compute = action._replace(kind=F if "F" in action.kind.value.split("_") else B)
                right = (place[action] > place[compute]) is (action.kind in SENDS)
                word = "before" if action.kind in SENDS else "after"
                values = {"rank": rank, "message": str(action), "word": word, "compute": str(compute)}
                message = (
                    "rank {rank}: {message} comes {word} {compute}. Send after computing, receive before use"
                )
                t.that(right, message, **values)


IN_BRACKETS = "In brackets is the cell at which a rank waits forever. "


@check("order", points=4)
def check_no_dead_lock(student, t):
    "Blocking messages never deadlock: AFAB, 1F1B, and tables without a pattern"
    for rows in cases.order_cases(t):
        where = stuck(student, t, rows)
        places, values = joined("place", where[:-1])
        m = f"{len(rows[0]) // 2} micro-batch" + "es" * (len(rows[0]) > 2)
        message = "deadlock with {ranks} ranks and {m}. " + IN_BRACKETS + places + ". {why}"
        t.that(not where, message, ranks=len(rows), m=m, why="".join(where[-1:]), **values)
    for _ in range(30):
        rows = cases.any_table(t, t.integer(2, 5), t.integer(3, 6))
        where = stuck(student, t, rows)
        table, cells = joined("row", [" ".join(row) for row in rows])
        places, values = joined("place", where[:-1])
        message = "AFAB and 1F1B run, but another table deadlocks: " + table + ". " + IN_BRACKETS + places
        message += '. {why}. A rule such as "odd ranks receive first" works for one schedule only'
        t.that(not where, message, why="".join(where[-1:]), **cells, **values)


# -- 5 · the loop


def same_gradients(t, run: Run, want: list[list[Tensor]], what: str, **values) -> None:
    """Check that every rank has the gradients of its stage."""
    for rank, result in enumerate(run.results):
        message = "rank {rank}: a parameter has no gradient " + what
        t.that(all(type(grad) is Tensor for grad in result["grads"]), message, rank=rank, **values)
        message, right = "gradient {i} of rank {rank} " + what, want[rank % len(want)]
        same(t, result["grads"], right, message, rank=rank, atol=1e-10, **values)


def some_sizes(t, count: int) -> list[int]:
    """Draw the sizes of micro-batches."""
    return [t.integer(1, 4) for _ in range(count)]


@check("loop", points=4, seconds=60)
def check_gradients_on_ranks(student, t):
    "The gradients of every rank are those of one process with the whole model"
    for make, ranks in ((afab, 2), (one_f_one_b, 3), (one_f_one_b, 4), (one_f_one_b, 1)):
        case = cases.drawn(t, ranks, some_sizes(t, ranks + t.integer(0, 2)))
        values = {"schedule": make.__name__, "ranks": ranks, "m": len(case.inputs)}
        what = "({schedule}, {ranks} ranks, {m} micro-batches)"
        same_gradients(t, cases.step(student, make, case), whole_step(*case)[1], what, **values)


@check("loop", points=2, seconds=30)
def check_messages_of_the_loop(student, t):
    "Each output and each gradient is sent once; the last rank returns the loss"
    ranks, micro_batches = 3, t.integer(2, 4)
    case = cases.drawn(t, ranks, some_sizes(t, micro_batches))
    run = cases.step(student, one_f_one_b, case)
    what = "the loss that run_row returns on the last rank, the sum of all parts"
    t.close(run.results[-1]["loss"], whole_step(*case)[0], what, rtol=1e-9)
    for rank, ((weight, _),) in enumerate(case.weights):
        sent, wanted = len(run.calls(rank, Kind.SEND)), micro_batches * ((rank > 0) + (rank < ranks - 1))
        message = (
            "rank {rank} sends {got} messages, but {want} are enough: shapes are known, so each output and "
            "each gradient is one message"
        )
        t.that(sent == wanted, message, rank=rank, got=sent, want=wanted)
        width = weight.shape[1] * (rank > 0) + weight.shape[0] * (rank < ranks - 1)
        got, want = run.bytes(rank, Kind.SEND), 8 * sum(map(len, case.inputs)) * width
        message = "rank {rank} sends {got} bytes, but its outputs and gradients have {want}"
        t.that(got == want, message, rank=rank, got=got, want=want)


@check("loop", points=2, seconds=30)
def check_received_is_used(student, t):
    "A rank computes with what it receives"
    case = cases.drawn(t, 3, [t.integer(1, 3)])
    element, by = t.integer(0, 2), t.uniform(0.5, 2.0)
    for call, name in enumerate(("input_plus", "gradient_plus")):
        nudge = Nudge(Kind.RECV, rank=1, call=call, element=element, by=by)
        _, grads = whole_step(*case, at=1, **{name: (element, by)})
        what = "does not follow from what rank 1 received: data that arrives must be used; the gradient"
        same_gradients(t, cases.step(student, one_f_one_b, case, nudge=nudge), grads, what)


CAUSES = {
    2: "It receives activations and sends gradients: free what was received after its use, and what was "
    "computed after its send",
    1: "The last rank frees its activations. Rank 1 also receives gradients: free each when its backward has "
    "used it",
    0: "No rank receives the gradient of its input: do not keep it",
}


@check("loop", points=2, seconds=60)
def check_memory_of_the_loop(student, t):
    "The loop frees what it has used"
    ranks, micro_batches, size, width = 3, 12, 2048, 128
    case, unit = cases.large(t, ranks, width, size, micro_batches), 4 * size * width
    run = cases.step(student, one_f_one_b, case)
    t.close(run.results[-1]["loss"], whole_step(*case)[0], "the loss", rtol=1e-3)
    for rank, cause in CAUSES.items():
        most, held = LIMITS[rank] + (micro_batches if rank == 0 else 0), run.memory(rank, "at work")
        values = {"rank": rank, "held": held // MIB, "n": ranks - rank, "m": micro_batches}
        message = (
            "rank {rank} of 3 holds {held} MB before a forward; an activation has {unit} MB, and at most "
            "{n} of {m} micro-batches are in flight. " + cause
        )
        t.that(held <= most * unit, message, unit=unit // MIB, **values)


# -- 12 · PipeDream: weight stashing


def flat(by_stage: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for stage in by_stage for tensor in stage]


TOO_OLD = "world size {ranks}: the versions are one too old: stash the weights that the forward reads"
SYNCHRONOUS = (
    "world size {ranks}: these are the weights of synchronous training, which is impossible without flush"
)


@check("stash", points=3, seconds=60)
def check_delayed_twin(student, t):
    "Without flush, the weights are those of the delayed twin, on 1 to 4 ranks"
    for ranks in (1, 2, 3, 4):
        lr, sizes = t.uniform(0.2, 0.5), [t.integer(2, 4) for _ in range(ranks + t.integer(4, 6))]
        case = cases.drawn(t, ranks, sizes)
        run = cases.asynchronously(student, case, lr)
        got = t.items(flat(run.results), 2 * ranks, "the weights and biases of all ranks")
        delays = [ranks - 1 - stage for stage in range(ranks)]
        mistakes = {TOO_OLD: [delay + 1 for delay in delays], SYNCHRONOUS: [0] * ranks}
        known = {words: flat(asynchronous_twin(*case, lr, wrong)) for words, wrong in mistakes.items()}
        want = flat(asynchronous_twin(*case, lr, delays))
        wrong_if(t, got, want, known, rtol=1e-9, ranks=ranks)
        what = (
            "{kind} of rank {rank} of {ranks} after {n} batches (backward needs the weights that the "
            "forward of the same batch has read)"
        )
        for number, (mine, right) in enumerate(zip(got, want)):
            values = {"kind": ("weight", "bias")[number % 2], "rank": number // 2, "ranks": ranks}
            t.close(mine, right, what, n=len(sizes), atol=1e-10, **values)
    uses_what_arrives(t, run, Kind.RECV, rank=t.integer(1, 2))


@check("stash", points=2, seconds=60)
def check_versions_kept(student, t):
    "A version is freed after its backward"
    ranks, width = 2, 512
    case, unit = cases.large(t, ranks, width, 2, 12), 4 * width * width
    run = cases.asynchronously(student, case, 0.05)
    for rank, (right, *_) in enumerate(asynchronous_twin(*case, 0.05, [1, 0])):
        got, held = run.results[rank][0], run.memory(rank, "at work")
        t.tensor(got, "the weights of rank {rank}", rank=rank, shape=right.shape, dtype=right.dtype)
        values = {"rank": rank, "held": held // MIB, "unit": unit // MIB, "n": ranks - rank}
        message = (
            "rank {rank} holds {held} MB; its weights have {unit} MB and it needs at most {n} versions of "
            "them: free each after its backward"
        )
        t.that(held <= (ranks - rank + 6) * unit, message, **values)


# -- 6 · a step


SIZES = "world size {ranks}, {m} micro-batches: "
OF_THIS_PIPELINE = SIZES + (
    "the loss is divided by the targets of this pipeline (`targets`). `every_target` has those of the whole "
    "batch"
)
BY_ALL_TARGETS = SIZES + (
    "the loss of the last rank is divided by all targets, not by those that are not -100"
)
OF_MICRO_BATCHES = SIZES + (
    "the loss of the last rank is that of one micro-batch divided by its targets, added up"
)
WRONG_LOSS = SIZES + (
    "the last rank returns the loss {got:g}; its micro-batches add {want:g} to the mean over the targets in "
    "every_target"
)


@check("step", points=3, seconds=60)
def check_whole_step(student, t):
    "Loss and gradients of a step are those of one process, with padded targets"
    for ranks in (1, 2, 3):
        micro_batches, size = ranks + t.integer(1, 3), t.integer(3, 5)
        case = cases.drawn(t, ranks, [size] * micro_batches)
        case.targets[0][: t.integer(1, 2)] = IGNORED
        # the targets of another pipeline come first, with one that does not count
        every = [t.integers(0, 2, size) for _ in case.targets] + case.targets
        every[0][:1] = IGNORED
        # every rank gets the inputs and the targets
        given = {"inputs": case.inputs, "targets": case.targets, "every_target": every}
        run = student.ranks(whole_rank, case.of_ranks(**given))
        alone, grads = whole_step(*case)
        valid, of_all = (int((torch.cat(each) != IGNORED).sum()) for each in (case.targets, every))
        loss = alone * valid / of_all
        sizes = {"ranks": ranks, "m": micro_batches}
        of_last = t.number(run.results[-1]["loss"], "what pipeline_step returns on the last rank")
        t.number(run.results[0]["loss"], "what pipeline_step returns on the first rank")
        added = sum(whole_step(case.weights, [x], [y])[0] for x, y in zip(case.inputs, case.targets))
        by_all = alone * valid / (2 * size * micro_batches)
        known = {OF_THIS_PIPELINE: alone, BY_ALL_TARGETS: by_all, OF_MICRO_BATCHES: added}
        is_near(t, of_last, loss, WRONG_LOSS, known, **sizes)
        grads = [[grad * (valid / of_all) for grad in stage] for stage in grads]
        same_gradients(t, run, grads, "after pipeline_step (world size {ranks}, {m} micro-batches)", **sizes)
    uses_what_arrives(t, run, Kind.RECV, rank=1)


# -- 7 · with data parallelism

NEIGHBOURS = (
    "{replicas} pipelines of {stages} stages: hybrid_step on rank {rank} should call step({want}) once, your "
    "calls are {got}. The neighbours are numbers of ranks, not of stages"
)
AVERAGED = (
    "{replicas} pipelines of {stages} stages: rank {rank} has the mean over pipelines. The loss is already "
    "divided by the targets of all pipelines: add, do not average"
)
NOT_ONCE = (
    "{replicas} pipelines of {stages} stages: hybrid_step does not call step once with the neighbours, "
    "numbers of ranks, and add the gradients that it leaves"
)


def passes_neighbours(student, t, replicas: int, stages: int) -> bool:
    """Return whether ``step`` gets the neighbours in the pipeline, once.

    The gradient is a sum of numbers that stand for them. What ``step`` says of its arguments only explains a
    wrong gradient.
    """
    world, names = replicas * stages, ("before_is", "after_is")
    given = [{name: double(t, world + 2) for name in names} for _ in range(world)]
    run = student.ranks(neighbours, [{"stages": stages, **numbers} for numbers in given])
    places = [cases.in_the_grid(rank, stages) for rank in range(world)]
    own = [
        torch.stack([numbers[name][world if place is None else place] for name, place in zip(names, each)])
        for numbers, each in zip(given, places)
    ]
    right = all(near(run.results[rank]["grad"], sum(own[rank % stages :: stages])) for rank in range(world))
    for rank, (result, each) in enumerate(zip(run.results, places)):
        want, got = ", ".join(map(str, each)), f"{result['passed']}"
        where = {"replicas": replicas, "stages": stages, "rank": rank, "want": want, "got": got}
        t.that(right or got == f"step({want})", NEIGHBOURS, **where)
    return right


@check("hybrid", points=2, seconds=60)
def check_hybrid_gradients(student, t):
    "Pipelines side by side: the gradients of every rank are those of the whole batch"
    for stages, replicas in ((2, 2), (1, 3)):
        case = cases.drawn(t, stages, some_sizes(t, 3 * replicas))
        sizes = {"replicas": replicas, "stages": stages}
        right = passes_neighbours(student, t, replicas, stages)
        run = cases.hybrid(student, case, replicas, own=True)
        _, grads = whole_step(*case)
        for rank, result in enumerate(run.results):
            means = [grad / replicas for grad in grads[rank % stages]]
            t.that(not near(result["grads"], means), AVERAGED, rank=rank, **sizes)
        what = (
            "({replicas} pipelines of {stages} stages: add the gradients of all ranks with this stage, "
            "once, after the step)"
        )
        same_gradients(t, run, grads, what, **sizes)
        t.that(right, NOT_ONCE, **sizes)


def hybrid_run(student, t, micro_batches: int, steps: int) -> tuple[Run, list[list[Tensor]]]:
    """Two pipelines of two stages, and the gradients of one process, of which those of the run have the
    forms."""
    case = cases.drawn(t, 2, some_sizes(t, micro_batches))
    run = cases.hybrid(student, case, replicas=2, steps=steps)
    _, grads = whole_step(*case)
    for rank, result in enumerate(run.results):
        for mine, right in zip(result["grads"], grads[rank % 2]):
            what, values = "a gradient of rank {rank} after {steps} steps", {"rank": rank, "steps": steps}
            t.tensor(mine, what, shape=right.shape, dtype=right.dtype, **values)
    return run, grads


@check("hybrid", points=1, seconds=30)
def check_hybrid_traffic(student, t):
    "Ranks with the same stage exchange gradients, by all-reduce only"
    run, grads = hybrid_run(student, t, micro_batches=4, steps=1)
    for rank in range(run.world):
        want = sum(right.nbytes for right in grads[rank % 2])
        got = run.bytes(rank) - run.bytes(rank, Kind.SEND) - run.bytes(rank, Kind.RECV)
        message = (
            "beside the messages of its pipeline, rank {rank} passes {got} bytes; the gradients of its "
            "stage have {want}, and all-reduce is enough"
        )
        t.that(got == want == run.bytes(rank, Kind.ALL_REDUCE), message, rank=rank, got=got, want=want)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 3))


@check("hybrid", points=1, seconds=30)
def check_groups_are_made_once(student, t):
    "No process group is made in a step"
    run, _ = hybrid_run(student, t, micro_batches=2, steps=3)
    message = (
        "in 3 steps rank {rank} adds gradients in {count} groups: hybrid_step makes a process group in every "
        "step. That is slow, and the groups are never freed: use `group`, which was made once"
    )
    for rank in range(run.world):
        groups = {call.group for call in run.calls(rank, Kind.ALL_REDUCE)}
        t.that(len(groups) <= 1, message, rank=rank, count=len(groups))

"""The visible checks of messages, of the loop on real ranks, of weight stashing and of pipelines side by side."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from dlo_lib.grading.contract import Kind, Nudge, Run, check
from dlo_lib.grading.schedules import read_table
from dlo_lib.parallel.pipeline.schedules import afab, one_f_one_b
from dlo_lib.parallel.pipeline.table import ActionKind, B, F, I, Schedule, W, in_a_loop

from .drawn import (
    SENDS,
    Rows,
    any_table,
    asynchronously,
    hybrid,
    messages_of,
    model_of,
    order_cases,
    samples_of,
    step,
    stuck_at,
)
from .twins import asynchronous_twin, near, whole_step

# -- 5 · the order of messages


def written(student, t, rows: Rows) -> Schedule:
    """The student's rows with messages."""
    kinds = frozenset(ActionKind) - {I, W}
    micro_batches = sum(cell.startswith("0F") for cell in rows[0])
    return read_table(t, student.with_messages(rows), in_a_loop(len(rows)), micro_batches, "with_messages(rows)", kinds)


def stuck(student, t, rows: Rows) -> list[str]:
    """The cells at which ranks wait for ever."""
    schedule = written(student, t, rows)
    passed = sum(action.kind not in (F, B) for row in schedule.rows for action in row)
    wanted = 4 * schedule.micro_batches * (len(rows) - 1)  # up and down, a send and a receive
    t.that(passed == wanted, "with {ranks} ranks there are {got} sends and receives, {want} are needed: nothing passes that is not written",
           ranks=len(rows), got=passed, want=wanted)  # fmt: skip
    return stuck_at(schedule.rows)


@check("order", points=2)
def check_each_message_once(student, t):
    "Each message is sent once and received once, where its data is there"
    for rows in order_cases(t):
        schedule = written(student, t, rows)
        for rank, (row, plain) in enumerate(zip(schedule.rows, rows)):
            computed = [str(action) for action in row if action.kind in (F, B)]
            message = "the computations of rank {rank} are {got}, they were {want}: only add messages"
            t.that(computed == plain, message, rank=rank, got=computed, want=plain)
            passed = Counter(action for action in row if action.kind not in (F, B))
            wanted = messages_of(len(rows), schedule.micro_batches, rank)
            t.that(
                passed == Counter(wanted),
                "rank {rank} of {ranks} has {got} messages, {want} are needed (the first rank receives no activations, the last sends none)",
                rank=rank, ranks=len(rows), got=passed.total(), want=len(wanted),
            )  # fmt: skip
            place = {action: at for at, action in enumerate(row)}
            for action in wanted:
                compute = action._replace(kind=F if "F" in action.kind.value.split("_") else B)
                sends = action.kind in SENDS
                t.that(
                    (place[action] > place[compute]) is sends,
                    "rank {rank}: {message} comes {word} {compute}. Send what has been computed, receive what will be used",
                    rank=rank, message=str(action), word="before" if sends else "after", compute=str(compute),
                )  # fmt: skip


@check("order", points=4)
def check_no_dead_lock(student, t):
    "Blocking messages come through: AFAB, 1F1B, and tables without a pattern"
    for rows in order_cases(t):
        cells = stuck(student, t, rows)
        t.that(
            not cells,
            "dead-lock with {ranks} ranks and {m} micro-batches: they stand at {cells}, each waits for the other. Two neighbours must meet their "
            "messages in the same order",
            ranks=len(rows), m=len(rows[0]) // 2, cells=", ".join(cells),
        )  # fmt: skip
    for _ in range(30):
        rows = any_table(t, t.integer(2, 5), t.integer(3, 6))
        cells = stuck(student, t, rows)
        t.that(
            not cells,
            "AFAB and 1F1B come through, but another table dead-locks: {rows}. They stand at {cells}. A rule such as \"odd ranks receive first\" "
            "belongs to one schedule",
            rows=" | ".join(" ".join(row) for row in rows), cells=", ".join(cells),
        )  # fmt: skip


# -- 6 · the loop


def same_gradients(t, run: Run, want: list[list[Tensor]], what: str, **values) -> None:
    """Every rank has the gradients of its stage."""
    for rank, result in enumerate(run.results):
        for number, (mine, right) in enumerate(zip(result["grads"], want[rank % len(want)])):
            t.that(type(mine) is Tensor, "rank {rank}: a parameter has no gradient " + what, rank=rank, **values)
            t.close(mine, right, f"gradient {{number}} of rank {{rank}} {what}", number=number, rank=rank, atol=1e-10, **values)


@check("loop", points=4, seconds=60)
def check_gradients_on_ranks(student, t):
    "The gradients of every rank are those of one process with the whole model"
    for make, ranks in ((afab, 2), (one_f_one_b, 3), (one_f_one_b, 4), (one_f_one_b, 1)):
        weights, micro_batches = model_of(t, ranks), ranks + t.integer(0, 2)
        inputs, targets = samples_of(t, weights, [t.integer(1, 4) for _ in range(micro_batches)])
        run = step(student, make, weights, inputs, targets)
        _, grads = whole_step(weights, inputs, targets)
        same_gradients(
            t, run, grads, "({schedule}, {ranks} ranks, {m} micro-batches)", schedule=make.__name__, ranks=ranks, m=micro_batches
        )


@check("loop", points=2, seconds=30)
def check_messages_of_the_loop(student, t):
    "Each output and each gradient is sent once; the last rank knows the loss"
    ranks, micro_batches = 3, t.integer(2, 4)
    weights = model_of(t, ranks)
    inputs, targets = samples_of(t, weights, [t.integer(1, 4) for _ in range(micro_batches)])
    run = step(student, one_f_one_b, weights, inputs, targets)
    loss, _ = whole_step(weights, inputs, targets)
    t.close(run.results[-1]["loss"], loss, "the loss that run_row returns on the last rank, the sum of all parts", rtol=1e-9)
    for rank in range(ranks):
        sent, wanted = len(run.calls(rank, Kind.SEND)), micro_batches * ((rank > 0) + (rank < ranks - 1))
        t.that(
            sent == wanted,
            "rank {rank} sends {got} messages, {want} are enough: shapes are known, so each output and each gradient is one message",
            rank=rank, got=sent, want=wanted,
        )  # fmt: skip
        width = (weights[rank][0][0].shape[1] if rank > 0 else 0) + (weights[rank][-1][0].shape[0] if rank < ranks - 1 else 0)
        got, want = run.bytes(rank, Kind.SEND), 8 * sum(map(len, inputs)) * width
        t.that(got == want, "rank {rank} sends {got} bytes, its outputs and gradients have {want}", rank=rank, got=got, want=want)


@check("loop", points=2, seconds=30)
def check_received_is_used(student, t):
    "What a rank receives is what it computes with"
    weights = model_of(t, 3)
    inputs, targets = samples_of(t, weights, [t.integer(1, 3)])
    element, by = t.integer(0, 2), t.uniform(0.5, 2.0)
    for call, name in enumerate(("input_plus", "gradient_plus")):
        run = step(student, one_f_one_b, weights, inputs, targets, nudge=Nudge(Kind.RECV, rank=1, call=call, element=element, by=by))
        _, grads = whole_step(weights, inputs, targets, at=1, **{name: (element, by)})
        same_gradients(t, run, grads, "does not follow from what rank 1 received: data that arrives must be used; it")


@check("loop", points=2, seconds=60)
def check_memory_of_the_loop(student, t):
    "What has been used is not kept"
    ranks, micro_batches, size, width = 2, 12, 2048, 128
    weights = [[(t.normal(width, width) / 11, t.normal(width))] for _ in range(ranks)]
    inputs, targets = [t.normal(size, width) for _ in range(micro_batches)], [t.integers(0, width - 1, size) for _ in range(micro_batches)]
    run = step(student, one_f_one_b, weights, inputs, targets)
    t.close(run.results[-1]["loss"], whole_step(weights, inputs, targets)[0], "the loss", rtol=1e-3)
    unit, held = 4 * size * width, run.memory(1, "at work")  # rank 0 holds the inputs of all
    t.that(
        held <= 9 * unit,
        "rank 1 holds {held} MB before a forward; a micro-batch is {unit} MB and one is in flight. Forget what was received when it has been used, "
        "and what was computed when it has been sent",
        held=held // 2**20, unit=unit // 2**20,
    )  # fmt: skip


# -- 9 · PipeDream: weight stashing


def flat(by_stage: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for stage in by_stage for tensor in stage]


@check("stash", points=3, seconds=60)
def check_delayed_twin(student, t):
    "Without flush, training is that of the delayed twin, on 1 to 4 ranks"
    for ranks in (1, 2, 3, 4):
        weights, lr = model_of(t, ranks), t.uniform(0.2, 0.5)
        inputs, targets = samples_of(t, weights, [t.integer(2, 4) for _ in range(ranks + t.integer(4, 6))])
        got = flat(asynchronously(student, weights, inputs, targets, lr).results)
        t.items(got, 2 * ranks, "the weights and biases of all ranks")
        delays = [ranks - 1 - stage for stage in range(ranks)]
        mistakes = {"the versions are one too old: stash the weights as they are at the forward": [delay + 1 for delay in delays]}
        if ranks > 1:
            mistakes["that is synchronous training; without flush it cannot be"] = [0] * ranks
        for words, wrong in mistakes.items():
            t.that(not near(got, flat(asynchronous_twin(weights, inputs, targets, lr, wrong))), "{ranks} ranks: " + words, ranks=ranks)
        for number, (mine, right) in enumerate(zip(got, flat(asynchronous_twin(weights, inputs, targets, lr, delays)))):
            t.close(
                mine, right,
                "{kind} of rank {rank} of {ranks} after {n} batches (backward needs the weights that the forward of the same batch has read)",
                kind=("weight", "bias")[number % 2], rank=number // 2, ranks=ranks, n=len(inputs), atol=1e-10,
            )  # fmt: skip


@check("stash", points=2, seconds=60)
def check_versions_kept(student, t):
    "A version is forgotten when its backward is done"
    ranks, batches, width = 2, 12, 512
    weights = [[(t.normal(width, width) / 23, t.normal(width))] for _ in range(ranks)]
    inputs, targets = [t.normal(2, width) for _ in range(batches)], [t.integers(0, width - 1, 2) for _ in range(batches)]
    run = asynchronously(student, weights, inputs, targets, 0.05)
    want = asynchronous_twin(weights, inputs, targets, 0.05, [1, 0])
    for rank, (got, right) in enumerate(zip(run.results, want)):
        t.tensor(got[0], "the weights of rank {rank}", rank=rank, shape=right[0].shape, dtype=right[0].dtype)
        unit, versions, held = 4 * width * width, ranks - rank, run.memory(rank, "at work")
        t.that(
            held <= (versions + 6) * unit,
            "rank {rank} holds {held} MB; its weights are {unit} MB and it needs at most {n} versions of them: forget one when its backward is done",
            rank=rank, held=held // 2**20, unit=unit // 2**20, n=versions,
        )  # fmt: skip


# -- 10 · with data parallelism


@check("hybrid", points=2, seconds=60)
def check_hybrid_gradients(student, t):
    "Pipelines side by side: the gradients of every rank are those of the whole batch"
    for stages, replicas in ((2, 2), (1, 3)):
        weights = model_of(t, stages)
        inputs, targets = samples_of(t, weights, [t.integer(1, 4) for _ in range(3 * replicas)])
        run = hybrid(student, weights, inputs, targets, replicas)
        _, grads = whole_step(weights, inputs, targets)
        sizes = {"replicas": replicas, "stages": stages}
        for rank, result in enumerate(run.results):
            t.that(
                not near(result["grads"], [right / replicas for right in grads[rank % stages]]),
                "{replicas} pipelines of {stages} stages: rank {rank} has the mean over pipelines. The loss is divided by the targets of all "
                "pipelines already: add, do not average",
                rank=rank, **sizes,
            )  # fmt: skip
        what = "({replicas} pipelines of {stages} stages: add the gradients of all ranks with this stage, once, after the step)"
        same_gradients(t, run, grads, what, **sizes)


@check("hybrid", points=1, seconds=30)
def check_hybrid_traffic(student, t):
    "Only ranks with the same stage exchange gradients, and only sums"
    weights = model_of(t, 2)
    inputs, targets = samples_of(t, weights, [t.integer(1, 4) for _ in range(4)])
    run = hybrid(student, weights, inputs, targets, replicas=2)
    _, grads = whole_step(weights, inputs, targets)
    for rank, result in enumerate(run.results):
        for mine, right in zip(result["grads"], grads[rank % 2]):
            t.tensor(mine, "a gradient of rank {rank}", rank=rank, shape=right.shape, dtype=right.dtype)
        want = sum(right.nbytes for right in grads[rank % 2])
        messages = run.bytes(rank, Kind.SEND) + run.bytes(rank, Kind.RECV)
        got = run.bytes(rank) - messages
        t.that(
            got == want == run.bytes(rank, Kind.ALL_REDUCE),
            "rank {rank} passes {got} bytes beside the messages of its pipeline; the gradients of its stage have {want}, and all-reduce is enough",
            rank=rank, got=got, want=want,
        )  # fmt: skip

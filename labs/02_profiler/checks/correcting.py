"""The visible checks of the corrected parts, by the operations that they run, and of FLOPs and roofline."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.graphs import ObservedOperation, observed
from dlo_lib.labkit.compare import near, same, wrong_if

from . import scenarios


def names_of(t, graph: Any) -> list[str]:
    """The names of the operations of a recorded graph, without the overload."""
    t.that(type(graph) is dict and type(graph.get("nodes")) is list, "the recorded operations cannot be read")
    nodes = [node for node in graph["nodes"] if type(node) is dict and node.get("kind") == "function"]
    return [str(node.get("op")).split(".")[0] for node in nodes]


def run_again(t, graph: Any, inputs: list[Tensor]) -> tuple[list[Tensor], list[ObservedOperation]]:
    """Run recorded operations on other inputs; return the results and what ran, without what is added."""
    names = set(names_of(t, graph))
    results, operations = observed(graph, inputs)
    return results, [operation for operation in operations if operation.name in names]


# -- 6 · batches

PICKS = {"index", "index_select", "gather", "slice", "select", "narrow", "split", "unbind"}
PICKS |= {"view", "detach", "alias", "take_along_dim"}
"""Operations that read only what they choose."""

PRECISION = {"rtol": 1e-4, "atol": 1e-4}


def batches_case(t, count: int = 0, features: int = 0) -> dict[str, Any]:
    """Draw images, labels, and the size of a batch."""
    size, features = t.integer(4, 6), features or t.integer(3, 6)
    count = count or 3 * size + t.integer(2, 3)
    images = t.normal(count, features)
    images = images * torch.tensor([t.uniform(0.5, 4.0) for _ in range(features)]) + t.uniform(1.0, 3.0)
    return {"images": images, "labels": t.integers(0, 9, count), "size": size, "seed": t.integer(0, 99)}


def orders_of(case: dict[str, Any], epochs: int) -> list[tuple[Tensor, ...]]:
    """The images of each batch, for epochs that continue with the random numbers of the epoch before."""
    generator = torch.Generator().manual_seed(case["seed"])
    count, size = len(case["images"]), case["size"]
    return [torch.randperm(count, generator=generator).split(size) for _ in range(epochs)]


def right_batches(case: dict[str, Any]) -> list[list[Tensor]]:
    (order,) = orders_of(case, 1)
    return [[standardised(case["images"])[chosen], case["labels"][chosen]] for chosen in order]


def standardised(images: Tensor) -> Tensor:
    distance = images.double() - images.double().mean(0)
    return (distance / (distance.square().sum(0) / (len(images) - 1)).sqrt()).float()


OF_BATCH = "The images are standardised with the statistics of their batch: use those of all images."
ONE_MEAN = (
    "All numbers have the same mean and standard deviation: each position has its own, mean(0) and std(0)."
)
CONTINUES = (
    "Each epoch continues with the random numbers of the epoch before: make the generator, with its seed, in "
    "__iter__."
)


@check("batches", points=1)
def check_same_batches(student, t):
    "The same batches, in the same order, in each epoch"
    case = batches_case(t)
    epochs, _ = t.items(student.run(scenarios.all_batches, **case), 2, "the result")
    right, every, (first, second) = right_batches(case), case["images"], orders_of(case, 2)
    for number, epoch in enumerate(t.items(epochs, 2, "the epochs"), 1):
        batches = t.items(epoch, len(right), "the batches of an epoch")
        for place, (batch, (want, numbers)) in enumerate(zip(batches, right)):
            images, labels = t.items(batch, 2, "a batch")
            raw = every[first[place]]
            mistakes = {
                "The images are not standardised.": raw,
                OF_BATCH: (raw - raw.mean(0)) / raw.std(0),
                ONE_MEAN: (raw - every.mean()) / every.std(),
            }
            if number == 2:
                mistakes[CONTINUES] = standardised(every)[second[place]]
            values = {"place": place + 1, "number": number}
            what = "the images of batch {place} of epoch {number}"
            same(t, images, want, what, mistakes, **PRECISION, **values)
            message = "the labels of batch {place} of epoch {number} are not right"
            t.that(near(labels, numbers), message, **values)


@check("batches", points=1)
def check_once(student, t):
    "The statistics are computed once, in __init__"
    case = batches_case(t)
    others = torch.cat(orders_of(case, 1)[0][1:])
    found = student.run(scenarios.first_batch, others=others, **case)
    images, _ = t.items(found, 2, "the first batch")
    changed = case | {"images": case["images"].index_copy(0, others, 50 * case["images"][others] + 7)}
    lesson = (
        "Images that changed after __init__, and are not in the first batch, change it: mean and standard "
        "deviation are computed when the iteration runs. Compute them once, in __init__."
    )
    want, mistake = (right_batches(one)[0][0] for one in (case, changed))
    same(t, images, want, "the first batch", {lesson: mistake}, **PRECISION)


def whole_images(t, student, case: dict[str, Any], epochs: int) -> list[str]:
    """The operations of an object and its epochs that read all images; they give the right batches for
    images that are drawn afterwards."""
    graph = student.run(scenarios.recorded_epochs, **case, epochs=epochs)
    other = dict(case, images=batches_case(t, len(case["images"]), case["images"].shape[1])["images"])
    results, operations = run_again(t, graph, [other["images"], other["labels"]])
    wrong = (
        "With other images, the recorded operations of Batches give wrong batches: stay with operations on "
        "tensors (no NumPy, no .tolist())."
    )
    in_an_epoch = len(right_batches(other))
    t.that(len(results) == 2 * in_an_epoch * epochs, wrong)
    want = in_order(standardised(other["images"]))
    for first in range(0, len(results), 2 * in_an_epoch):
        images = results[first : first + 2 * in_an_epoch : 2]
        good = all(each.dim() == 2 and each.shape[1] == want.shape[1] for each in images)
        t.that(good and near(in_order(torch.cat(images).float()), want, **PRECISION), wrong)
    numbers = other["images"].numel()
    return [each.name for each in operations if each.reads >= numbers and each.name not in PICKS]


def in_order(rows: Tensor) -> Tensor:
    """The rows, sorted by their first number: the order of an epoch is another check."""
    return rows[rows[:, 0].argsort()]


@check("batches", points=2)
def check_own_images(student, t):
    "A batch handles only its own images"
    case, epochs = batches_case(t), t.integer(3, 4)
    once, often = (whole_images(t, student, case, count) for count in (1, epochs))
    repeated = len(often) - len(once)
    each_batch = repeated >= (epochs - 1) * len(right_batches(case))
    when = "for one batch" if each_batch else "again in each epoch"
    message = (
        "The operation {name} reads {elements} numbers, those of all images, {when}: do it once, in "
        "__init__, or for the chosen images only."
    )
    added = [*(Counter(often) - Counter(once)), ""]
    t.that(repeated <= 0, message, name=added[0], elements=case["images"].numel(), when=when)


@check("batches", points=1)
def check_given(student, t):
    "The images that are given are not changed"
    case = batches_case(t)
    epochs, after = t.items(student.run(scenarios.all_batches, **case), 2, "the result")
    got, _ = t.items(t.items(epochs, 2, "the epochs")[0][0], 2, "a batch")
    t.tensor(got, "the images of a batch", dtype=torch.float32)
    unchanged = any(near(got[0], row) for row in case["images"].unbind())
    t.that(not unchanged, "not tested yet: the images are not standardised")
    message = "Batches has changed the images that it was given (-= and /= work in place): make new ones"
    t.that(near(after, case["images"]), message)


# -- 7 · block


def block_case(t) -> dict[str, Tensor]:
    inputs, outputs = t.integer(4, 7), t.integer(2, 5)
    gain = torch.tensor([t.uniform(0.5, 1.5) for _ in range(inputs)], dtype=torch.float64)
    case = {"weight": t.normal(outputs, inputs), "bias": t.normal(outputs), "gain": gain}
    return case | {"x": t.normal(t.integer(3, 6), inputs)}


def scaled_line(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """The output of a block."""
    return ((x.double() * gain) @ weight.double().T + bias.double()).float()


@check("block", points=1)
def check_same_block(student, t):
    "The same output and the same gradients"
    case = block_case(t)
    grad = t.normal(len(case["x"]), len(case["bias"]))
    got = t.items(student.run(scenarios.block_step, grad=grad, **case), 4, "the result")
    plain = scaled_line(**case | {"gain": torch.ones_like(case["gain"])})
    mistakes = {"The inputs are not scaled: multiply them by the gain.": plain}
    same(t, got[0], scaled_line(**case), "the output of the block", mistakes, atol=1e-5)
    double, scaled = grad.double(), case["x"].double() * case["gain"]
    of_input = (double @ case["weight"].double()) * case["gain"]
    gradients = {"input": of_input, "weight": double.T @ scaled, "bias": double.sum(0)}
    for (name, right), mine in zip(gradients.items(), got[1:]):
        t.close(mine, right.float(), "the gradient of its {name}", atol=1e-5, name=name)


def fresh_inputs(t, case: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Draw input, weight and bias for a block that was recorded with `case`; the input has `dtype`."""
    fresh = {name: t.normal(*case[name].shape) for name in ("x", "weight", "bias")}
    return fresh | {"x": fresh["x"].to(dtype)}


CONVERTS = (
    "forward converts {count} tensors in each step (.to, .float, .double): with a gain in float32, made in "
    "__init__, nothing has to be converted"
)
ELSEWHERE = "The output does not come from operations on input and weights: stay with tensors in forward."


@check("block", points=2)
def check_float32(student, t):
    "float32 everywhere, and no conversion in forward"
    case = block_case(t)
    graph, y = t.items(student.run(scenarios.recorded_block, **case), 2, "the result")
    t.tensor(y, "the output of the block", dtype=torch.float32)
    names = names_of(t, graph)
    t.that("_to_copy" not in names, CONVERTS, count=names.count("_to_copy"))
    fresh = fresh_inputs(t, case)
    results, operations = run_again(t, graph, list(fresh.values()))
    doubles = [operation.name for operation in operations if "float64" in operation.dtypes]
    message = "The operation {name} computes in float64: convert the gain, once, in __init__."
    t.that(not doubles, message, name=(doubles or [""])[0])
    want = scaled_line(gain=case["gain"], **fresh)
    t.that(len(results) == 1 and near(results[0], want, 1e-4, 1e-5), ELSEWHERE)
    converts_nothing(student, t)


def converts_nothing(student, t) -> None:
    """Check that forward has no conversion, also none that converts nothing in float32."""
    case = {name: value.double() for name, value in block_case(t).items()}
    want = (case["x"] * case["gain"]) @ case["weight"].T + case["bias"]
    got = student.run(scenarios.double_block, **case)
    message = (
        "A block in float64 (block.double()) gives a result in {dtype}, or with its precision: forward calls "
        ".float() or .to(torch.float32), which has nothing to convert if the gain is float32: remove it"
    )
    dtype = got.dtype if isinstance(got, Tensor) else type(got).__name__
    t.that(near(got, want, 1e-10, 1e-10) and got.dtype == want.dtype, message, dtype=str(dtype))
    case = block_case(t)
    graph = student.run(scenarios.mixed_block, **case)
    if graph is None:
        return  # it refuses an input of another dtype, as nn.Linear does
    message = (
        "A block in float32 accepts an input in float64: forward calls .to(x.dtype), which has nothing to "
        "convert if the gain is float32: remove it"
    )
    t.that("_to_copy" not in names_of(t, graph), message)
    fresh = fresh_inputs(t, case, torch.float64)
    results, _ = run_again(t, graph, list(fresh.values()))
    want = scaled_line(gain=case["gain"], **fresh)
    t.that(len(results) == 1 and near(results[0].float(), want, 1e-4, 1e-5), ELSEWHERE)


@check("block", points=1)
def check_buffer(student, t):
    "The gain is a buffer, in float32"
    case = block_case(t)
    result = student.run(scenarios.block_buffers, weight=case["weight"], gain=case["gain"])
    gain, saved = t.items(result, 2, "the result")
    message = (
        "the block has no buffer `gain`: a tensor that is only an attribute stays on the CPU when the model "
        "moves to a GPU. Use register_buffer."
    )
    t.that(gain is not None, message)
    message = "the buffer `gain` is not saved with the model: register it without persistent=False"
    t.that(saved is not None, message)
    t.tensor(gain, "the buffer gain", dtype=torch.float32)
    t.close(gain, case["gain"].float(), "the buffer gain", rtol=1e-6, atol=1e-6)


# -- 8 · accuracy


Batch = tuple[Tensor, Tensor]


def counts_batch(t, batch: int, classes: int) -> Batch:
    """Draw logits and labels of which about half are right; the last class has no image."""
    labels = t.integers(0, classes - 2, batch)
    logits = t.normal(batch, classes)
    for row, label in enumerate(labels.tolist()):
        if row % 2 == 0:
            logits[row, label] += 9
    return logits, labels


def right_counts(batches: list[Batch], classes: int, of_predicted: bool = False) -> Tensor:
    """The counts of right images and of all images, by label, or by mistake by the predicted class."""
    logits, labels = (torch.cat(each) for each in zip(*batches))
    best = logits.argmax(1)
    counted = best if of_predicted else labels
    return torch.stack([each.bincount(minlength=classes) for each in (counted[best == labels], counted)])


def last_writes(batch: Batch, classes: int) -> Tensor:
    """What `x[0, labels] += right` and `x[1, labels] += 1` add to empty counts."""
    counts = torch.zeros(2, classes, dtype=torch.int64)
    for logits, label in zip(*batch):
        counts[:, label] = torch.tensor([int(logits.argmax()) == int(label), 1])
    return counts


def mistaken_counts(batches: list[Batch], classes: int) -> dict[str, Tensor]:
    """What mistakes count, by what the student reads."""
    clamped = torch.stack([right_counts([batch], classes).clamp(max=1) for batch in batches]).sum(0)
    return {
        "Only the last batch is counted: add to the counts.": right_counts(batches[-1:], classes),
        "The two rows are exchanged: the images that are right come first.": right_counts(
            batches, classes
        ).flip(0),
        "The images are counted under the class that the model predicts: count them under their "
        "label.": right_counts(batches, classes, of_predicted=True),
        "A label that occurs several times in a batch counts once: x[index] += 1 writes each place once. "
        "Use index_add_.": clamped,
        "A label that occurs several times in a batch counts once: x[index] += values keeps the last value "
        "of each place. Use index_add_.": torch.stack([last_writes(one, classes) for one in batches]).sum(0),
    }


@check("accuracy", points=1)
def check_counts(student, t):
    "The counts after several batches"
    classes = t.integer(4, 6)

    def tells(batches: list[Batch]) -> bool:
        found = [right_counts(batches, classes), *mistaken_counts(batches, classes).values()]
        return len({tuple(counts.flatten().tolist()) for counts in found}) == len(found)

    batches = t.draw_until(lambda: [counts_batch(t, t.integer(7, 12), classes) for _ in range(3)], tells)
    got = student.run(scenarios.counted, classes=classes, batches=batches)
    want = right_counts(batches, classes)
    t.tensor(got, "counts()", shape=want.shape, dtype=torch.int64)
    wrong_if(t, got, want, mistaken_counts(batches, classes))
    t.that(near(got, want), "the counts are {got}, expected {want}", got=got.tolist(), want=want.tolist())


def recorded_update(student, t, classes: int, size: int) -> tuple[Any, bool]:
    """The operations of two updates with batches of `size` images, and whether their counts were right."""
    batches = [counts_batch(t, size, classes) for _ in range(2)]
    got = student.run(scenarios.recorded_counts, classes=classes, case=by_name(batches))
    graph, counts = t.items(got, 2, "a recorded update")
    return graph, near(counts, right_counts(batches, classes))


def by_name(batches: list[Batch]) -> dict[str, Tensor]:
    """The inputs of recorded updates, in their order."""
    named = [{f"logits{n}": logits, f"labels{n}": labels} for n, (logits, labels) in enumerate(batches)]
    return named[0] | named[1]


@check("accuracy", points=1, seconds=2)
def check_no_loop(student, t):
    "The number of operators does not depend on the batch"
    classes, few, many = t.integer(4, 6), t.integer(3, 5), t.integer(9, 12)
    less, more = (len(names_of(t, recorded_update(student, t, classes, size)[0])) for size in (few, many))
    message = (
        "update runs {less} operators for two batches of {few} images, and {more} for two of {many}: it "
        "loops over the images. Handle all of them at once."
    )
    t.that(more <= less, message, less=less, more=more, few=few, many=many)
    # A loop over a million images does not end in the seconds of this check, whatever was recorded.
    batch = counts_batch(t, 1000, classes)
    got = student.run(scenarios.counted, classes=classes, batches=[batch], times=1000)
    t.that(near(got, 1000 * right_counts([batch], classes)), "not tested yet: the counts are not right")


@check("accuracy", points=1)
def check_device(student, t):
    "The counts are on the device that is given"
    classes = t.integer(4, 6)
    for device in t.shuffled(("cpu", "meta")):
        got = student.run(scenarios.empty_counts, classes=classes, device=device)
        message = "for torch.device({device}), counts() has {got}, expected {want} (device, shape and dtype)"
        want = [device, [2, classes], torch.int64]
        t.that(got == want, message, device=repr(device), got=got, want=want)


READS = {"_local_scalar_dense", "is_nonzero", "equal"}
SIZED_BY_VALUES = {"nonzero", "bincount", "masked_select", "histc", "_histogramdd"}
SIZED_BY_VALUES |= {"unique", "_unique2", "unique_consecutive", "unique_dim"}


def picks_by_mask(graph: Any) -> bool:
    """Whether an `index` of the graph had a mask, which the recorder marks."""
    return any(node.get("masked") is True for node in graph["nodes"] if type(node) is dict)


@check("accuracy", points=2)
def check_no_reads(student, t):
    "Nothing in update needs a value on the CPU"
    classes, size = t.integer(4, 6), t.integer(6, 9)
    graph, right = recorded_update(student, t, classes, size)
    names = names_of(t, graph)
    t.that(len(names) > 0, "not tested yet: update runs no operator")
    reads = [name for name in names if name in READS]
    message = (
        "update reads {count} values (.item(), int(), `if` on a tensor; on a CPU also F.one_hot): on a GPU "
        "each read waits for all work in the queue"
    )
    t.that(not reads, message, count=len(reads))
    sized = [name for name in names if name in SIZED_BY_VALUES] + ["x[mask]"] * picks_by_mask(graph)
    message = (
        "The size of the result of {name} depends on values, so PyTorch has to wait for them to allocate "
        "it: use index_add_ or scatter_add_."
    )
    t.that(not sized, message, name=(sized or [""])[0])
    others = [counts_batch(t, size, classes) for _ in range(2)]
    results, _ = run_again(t, graph, list(by_name(others).values()))
    lesson = (
        "Some counts do not come from operations on the logits and the labels (.tolist(), NumPy): a GPU "
        "would wait for each of them. Stay with tensors."
    )
    t.that(len(results) == 1 and near(results[0], right_counts(others, classes)), lesson)
    t.that(right, "not tested yet: the counts are not right")

"""The visible checks of the corrected parts, by the operations that they run, and of FLOPs and roofline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.graphs import replay
from dlo_lib.labkit.compare import near, wrong_if

from .scenarios import (
    all_batches,
    block_buffers,
    block_step,
    counted,
    epoch_operations,
    first_batch,
    recorded_block,
    recorded_counts,
    second_batch,
)


class Seen(TorchDispatchMode):
    """Records the operations that run: name, the most elements of an input, and the dtypes of inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int, set[torch.dtype]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips the compiler imports it, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        largest = max((tensor.numel() for tensor in given), default=0)
        self.operations.append((func.__name__.split(".")[0], largest, {tensor.dtype for tensor in [*given, *made]}))
        return out


def names_of(t, graph: Any) -> list[str]:
    """The names of the operations of a recorded graph, without the overload."""
    t.that(type(graph) is dict and type(graph.get("nodes")) is list, "the recorded operations cannot be read")
    nodes = [node for node in graph["nodes"] if type(node) is dict and node.get("kind") == "function"]
    return [str(node.get("op")).split(".")[0] for node in nodes]


def run_again(t, graph: Any, inputs: list[Tensor]) -> tuple[list[Tensor], list[tuple[str, int, set[torch.dtype]]]]:
    """Run recorded operations on other inputs; return the results and what ran, without what the replay adds."""
    names = set(names_of(t, graph))
    with Seen() as seen:
        results = replay(graph, inputs)
    return results, [operation for operation in seen.operations if operation[0] in names]


# -- 6 · batches

PICKS = {"index", "index_select", "gather", "slice", "select", "narrow", "split", "unbind", "view", "detach", "alias", "take_along_dim"}


def batches_case(t) -> dict[str, Any]:
    size, features = t.integer(4, 6), t.integer(3, 6)
    count = 3 * size + t.integer(2, 3)
    images = t.normal(count, features) * torch.tensor([t.uniform(0.5, 4.0) for _ in range(features)]) + t.uniform(1.0, 3.0)
    return {"images": images, "labels": t.integers(0, 9, count), "size": size, "seed": t.integer(0, 99)}


def right_batches(case: dict[str, Any]) -> list[list[Tensor]]:
    order = torch.randperm(len(case["images"]), generator=torch.Generator().manual_seed(case["seed"]))
    return [[standardised(case["images"])[chosen], case["labels"][chosen]] for chosen in order.split(case["size"])]


def standardised(images: Tensor) -> Tensor:
    double = images.double()
    whole = ((double - double.mean(0)) / (double - double.mean(0)).square().sum(0).div(len(double) - 1).sqrt()).float()
    return whole


@check("batches", points=1)
def check_same_batches(student, t):
    "The same batches, in the same order, in each epoch"
    case = batches_case(t)
    epochs, _ = t.items(student.run(all_batches, **case), 2, "the result")
    right = right_batches(case)
    generator = torch.Generator().manual_seed(case["seed"])
    first, second = (torch.randperm(len(case["images"]), generator=generator).split(case["size"]) for _ in range(2))
    every = case["images"]
    for number, epoch in enumerate(t.items(epochs, 2, "the epochs"), 1):
        for place, (batch, want) in enumerate(zip(t.items(epoch, len(right), "the batches of an epoch"), right), 1):
            images, labels = t.items(batch, 2, "a batch")
            raw = every[first[place - 1]]
            within = (raw - raw.mean(0)) / raw.std(0)
            mistakes = {
                "The images are not standardised.": raw,
                "The images are standardised with the statistics of their batch: use those of all images.": within,
                "All numbers have the same mean and standard deviation: each position has its own, mean(0) and std(0).": (
                    (raw - every.mean()) / every.std()
                ),
                "Each epoch continues with the random numbers of the epoch before: make the generator, with its seed, in __iter__.": (
                    standardised(every)[second[place - 1]] if number == 2 else raw
                ),
            }
            wrong_if(t, images, want[0], mistakes, rtol=1e-4, atol=1e-4)
            t.close(images, want[0], "the images of batch {place} of epoch {number}", rtol=1e-4, atol=1e-4, place=place, number=number)
            t.that(near(labels, want[1]), "the labels of batch {place} of epoch {number} are not right", place=place, number=number)


@check("batches", points=1)
def check_once(student, t):
    "The statistics are computed once, in __init__"
    case = batches_case(t)
    order = torch.randperm(len(case["images"]), generator=torch.Generator().manual_seed(case["seed"]))
    others = order[case["size"] :]
    images, _ = t.items(student.run(first_batch, others=others, **case), 2, "the first batch")
    want = right_batches(case)[0][0]
    changed = dict(case, images=case["images"].clone())
    changed["images"][others] = 50 * changed["images"][others] + 7
    lesson = (
        "Images that changed after __init__, and are not in the first batch, change it: mean and standard deviation are computed when the "
        "iteration runs. Compute them once, in __init__."
    )
    wrong_if(t, images, want, {lesson: right_batches(changed)[0][0]}, rtol=1e-4, atol=1e-4)
    t.close(images, want, "the first batch", rtol=1e-4, atol=1e-4)


@check("batches", points=2)
def check_own_images(student, t):
    "A batch handles only its own images"
    case = batches_case(t)
    graph, batch = t.items(student.run(second_batch, **case), 2, "the second batch")
    images, _ = t.items(batch, 2, "the second batch")
    want = right_batches(case)[1][0]
    _, operations = run_again(t, graph, [case["images"], case["labels"]])
    for name, elements, _ in operations:
        message = "The operation {name} reads {elements} numbers, those of all images, for one batch: do it once, in __init__, or for the chosen images only."
        t.that(elements < case["images"].numel() or name in PICKS, message, name=name, elements=elements)
    seen, _ = t.items(student.run(epoch_operations, **case), 2, "the operations of an epoch")
    for operation in seen:
        name, elements = t.items(operation, 2, "an operation")
        message = "The operation {name} reads {elements} numbers, those of all images, again in each epoch: do it once, in __init__, or for the chosen images only."
        t.that(elements < case["images"].numel() or name in PICKS, message, name=name, elements=elements)
    t.close(images, want, "the images of the second batch", rtol=1e-4, atol=1e-4)


@check("batches", points=1)
def check_given(student, t):
    "The images that are given are not changed"
    case = batches_case(t)
    epochs, after = t.items(student.run(all_batches, **case), 2, "the result")
    got = t.items(t.items(epochs, 2, "the epochs")[0][0], 2, "a batch")[0]
    raw = [case["images"][row] for row in range(len(case["images"]))]
    t.tensor(got, "the images of a batch", dtype=torch.float32)
    t.that(not any(near(got[0], row) for row in raw), "not tested yet: the images are not standardised")
    t.that(near(after, case["images"]), "Batches has changed the images that it was given (-= and /= work in place): make new ones")


# -- 7 · block


def block_case(t) -> dict[str, Tensor]:
    inputs, outputs = t.integer(4, 7), t.integer(2, 5)
    gain = torch.tensor([t.uniform(0.5, 1.5) for _ in range(inputs)], dtype=torch.float64)
    return {"weight": t.normal(outputs, inputs), "bias": t.normal(outputs), "gain": gain, "x": t.normal(t.integer(3, 6), inputs)}


def scaled_line(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """The output of a block, in float64."""
    return (x.double() * gain) @ weight.double().T + bias.double()


@check("block", points=1)
def check_same_block(student, t):
    "The same output and the same gradients"
    case = block_case(t)
    grad = t.normal(len(case["x"]), len(case["bias"]))
    got = t.items(student.run(block_step, grad=grad, **case), 4, "the result")
    scaled = case["x"].double() * case["gain"]
    want = [
        scaled_line(**case),
        (grad.double() @ case["weight"].double()) * case["gain"],
        grad.double().T @ scaled,
        grad.double().sum(0),
    ]
    t.tensor(got[0], "the output of the block", shape=want[0].shape, dtype=torch.float32)
    plain = scaled_line(case["x"], case["weight"], case["bias"], torch.ones_like(case["gain"]))
    wrong_if(t, got[0], want[0].float(), {"The inputs are not scaled: multiply them by the gain.": plain.float()}, rtol=1e-4, atol=1e-5)
    names = ("the output of the block", "the gradient of its input", "the gradient of its weight", "the gradient of its bias")
    for name, mine, right in zip(names, got, want):
        t.close(mine, right.float(), "{name}", rtol=1e-4, atol=1e-5, name=name)


@check("block", points=2)
def check_float32(student, t):
    "float32 everywhere, and no conversion in forward"
    case = block_case(t)
    graph, y, called = t.items(student.run(recorded_block, **case), 3, "the result")
    t.tensor(y, "the output of the block", dtype=torch.float32)
    other = block_case(t)
    fresh = {"x": t.normal(5, len(case["gain"])), "weight": t.normal(*case["weight"].shape), "bias": t.normal(len(case["bias"]))}
    names = names_of(t, graph)
    message = "forward converts {count} tensors in each step (.to, .float, .double): with a gain in float32, made in __init__, nothing has to be converted"
    t.that("_to_copy" not in names, message, count=names.count("_to_copy"))
    results, operations = run_again(t, graph, list(fresh.values()))
    doubles = [name for name, _, dtypes in operations if torch.float64 in dtypes]
    t.that(
        not doubles, "The operation {name} computes in float64: convert the gain, once, in __init__.", name=doubles[0] if doubles else ""
    )
    message = "forward calls .{name}(), which has nothing to convert if the gain is float32: remove it"
    t.that(type(called) is list and not called, message, name=called[0] if called else "")
    want = scaled_line(gain=case["gain"], **fresh).float()
    lesson = "The output does not come from operations on the input and the weights: stay with tensors in forward."
    t.that(len(other) == len(case) and near(results[0], want, 1e-4, 1e-5), lesson)


@check("block", points=1)
def check_buffer(student, t):
    "The gain is a buffer, in float32"
    case = block_case(t)
    gain, saved = t.items(student.run(block_buffers, weight=case["weight"], gain=case["gain"]), 2, "the result")
    message = "the block has no buffer `gain`: a tensor that is only an attribute stays on the CPU when the model moves to a GPU. Use register_buffer."
    t.that(gain is not None, message)
    t.that(saved is not None, "the buffer `gain` is not saved with the model: register it without persistent=False")
    t.tensor(gain, "the buffer gain", dtype=torch.float32)
    t.close(gain, case["gain"].float(), "the buffer gain", rtol=1e-6, atol=1e-6)


# -- 8 · accuracy


def counts_batch(t, batch: int, classes: int) -> tuple[Tensor, Tensor]:
    """Draw logits and labels of which about half are right; the last class has no image."""
    labels = t.integers(0, classes - 2, batch)
    logits = t.normal(batch, classes)
    for row, label in enumerate(labels.tolist()):
        if row % 2 == 0:
            logits[row, label] += 9
    return logits, labels


def right_counts(batches: list[tuple[Tensor, Tensor]], classes: int) -> Tensor:
    counts = torch.zeros(2, classes, dtype=torch.int64)
    for logits, labels in batches:
        for row, label in zip(logits.tolist(), labels.tolist()):
            counts[1, label] += 1
            counts[0, label] += row.index(max(row)) == label
    return counts


def last_writes(batch: tuple[Tensor, Tensor], classes: int) -> Tensor:
    """What `x[0, labels] += right` and `x[1, labels] += 1` add to empty counts."""
    logits, labels = batch
    counts = torch.zeros(2, classes, dtype=torch.int64)
    for row, label in zip(logits.tolist(), labels.tolist()):
        counts[1, label], counts[0, label] = 1, int(row.index(max(row)) == label)
    return counts


@check("accuracy", points=1)
def check_counts(student, t):
    "The counts after several batches"
    classes = t.integer(4, 6)
    batches = [counts_batch(t, t.integer(7, 12), classes) for _ in range(3)]
    got = student.run(counted, classes=classes, logits=[logits for logits, _ in batches], labels=[labels for _, labels in batches])
    want = right_counts(batches, classes)
    t.tensor(got, "counts()", shape=want.shape, dtype=torch.int64)
    predicted = torch.zeros_like(want)
    for logits, labels in batches:
        for best, label in zip(logits.argmax(1).tolist(), labels.tolist()):
            predicted[0, best] += best == label
            predicted[1, best] += 1
    mistakes = {
        "Only the last batch is counted: add to the counts.": right_counts(batches[-1:], classes),
        "The two rows are exchanged: the images that are right come first.": want.flip(0),
        "The images are counted under the class that the model predicts: count them under their label.": predicted,
        "A label that occurs several times in a batch counts once: x[index] += 1 writes each place once. Use index_add_.": torch.stack(
            [sum(right_counts([b], classes)[row].clamp(max=1) for b in batches) for row in range(2)]
        ),
        "A label that occurs several times in a batch counts once: x[index] += values keeps the last value of each place. Use index_add_.": sum(
            last_writes(batch, classes) for batch in batches
        ),
    }
    wrong_if(t, got, want, mistakes)
    t.that(near(got, want), "the counts are {got}, expected {want}", got=got.tolist(), want=want.tolist())


def recorded_cases(student, t, sizes: tuple[int, ...]) -> tuple[list[Any], list[dict[str, Tensor]], int]:
    classes, cases = t.integer(4, 6), []
    for size in sizes:
        (logits0, labels0), (logits1, labels1) = (counts_batch(t, size, classes) for _ in range(2))
        cases.append({"logits0": logits0, "labels0": labels0, "logits1": logits1, "labels1": labels1})
    return t.items(student.run(recorded_counts, classes=classes, cases=cases), len(sizes), "the recorded updates"), cases, classes


def counts_of(case: dict[str, Tensor], classes: int) -> Tensor:
    return right_counts([(case["logits0"], case["labels0"]), (case["logits1"], case["labels1"])], classes)


@check("accuracy", points=2)
def check_no_loop(student, t):
    "The number of operators does not depend on the batch"
    few, many = t.integer(3, 5), t.integer(9, 12)
    found, cases, classes = recorded_cases(student, t, (few, many))
    less, more = (len(names_of(t, t.items(each, 2, "a recorded update")[0])) for each in found)
    message = "update runs {less} operators for two batches of {few} images, and {more} for two of {many}: it loops over the images. Handle all of them at once."
    t.that(more <= less, message, less=less, more=more, few=few, many=many)
    t.that(near(found[1][1], counts_of(cases[1], classes)), "not tested yet: the counts are not right")


READS = {"_local_scalar_dense", "is_nonzero", "equal"}
SIZED_BY_VALUES = {
    "nonzero",
    "bincount",
    "masked_select",
    "unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "histc",
    "_histogramdd",
}
MASKS = {"eq", "ne", "lt", "gt", "le", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"}


def picks_by_mask(graph: Any) -> bool:
    """Whether an `index` of the graph has the result of a comparison among its indices."""
    made = {node.get("name"): str(node.get("op")).split(".")[0] for node in graph["nodes"] if type(node) is dict}
    for node in graph["nodes"]:
        if type(node) is dict and str(node.get("op")).startswith("index.Tensor"):
            refs = [leaf for leaf in tree_leaves(node.get("args")) if type(leaf) is str]
            if any(made.get(ref) in MASKS for ref in refs[1:]):
                return True
    return False


@check("accuracy", points=2)
def check_no_reads(student, t):
    "Nothing in update needs a value on the CPU"
    size = t.integer(6, 9)
    found, cases, classes = recorded_cases(student, t, (size, size))
    (graph, first), (_, second) = (t.items(each, 2, "a recorded update") for each in found)
    names = names_of(t, graph)
    t.that(len(names) > 0, "not tested yet: update runs no operator")
    reads = [name for name in names if name in READS]
    message = "update reads {count} values (.item(), int(), `if` on a tensor; on a CPU also F.one_hot): on a GPU each read waits for all work in the queue"
    t.that(not reads, message, count=len(reads))
    sized = [name for name in names if name in SIZED_BY_VALUES] + ["x[mask]"] * picks_by_mask(graph)
    message = "The size of the result of {name} depends on values, so PyTorch has to wait for them to allocate it: use index_add_ or scatter_add_."
    t.that(not sized, message, name=sized[0] if sized else "")
    results, _ = run_again(t, graph, list(cases[1].values()))
    lesson = "Some counts do not come from operations on the logits and the labels (.tolist(), NumPy): a GPU would wait for each of them. Stay with tensors."
    t.that(len(results) == 1 and near(results[0], second), lesson)
    t.that(near(first, counts_of(cases[0], classes)), "not tested yet: the counts are not right")

"""The scenarios of the checks: they run beside the student's classes and return what was observed, without
expected values."""

import torch

from dlo_lib.grading.checks.contract import scenario


@scenario
def parents_of_many(student, begins, ends):
    """The parents of spans of one track; None for what is no number."""
    names = ("aten::linear", "aten::addmm", "aten::copy_")
    spans = [
        {"name": names[number % 3], "track": 17, "begin": begin, "end": end}
        for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist()))
    ]
    found = student.parents(spans)
    is_list = type(found) in (list, tuple)
    return [place if type(place) is int else None for place in found] if is_list else found


@scenario
def all_batches(student, images, labels, size, seed):
    """The batches of two epochs, and the images that were given."""
    batches = student.Batches(images, labels, size, seed)
    return [[[list(batch) for batch in batches] for _ in range(2)], images]


@scenario
def first_batch(student, images, labels, size, seed, others):
    """The first batch, of which the other images changed after the object was made."""
    batches = student.Batches(images, labels, size, seed)
    images[others] = 50 * images[others] + 7
    return list(next(iter(batches)))


def record(inputs, function):
    """The operations of ``function`` as data, and what it returns: a tensor or a list of tensors."""
    from dlo_lib.base.operation_capture import OperationRecorder

    recorder = OperationRecorder(inputs)
    with recorder, torch.no_grad():
        found = function()
    return [recorder.graph(found if type(found) is list else [found]), found]


@scenario
def recorded_epochs(student, images, labels, size, seed, epochs):
    """The operations of an object and of its epochs, as data; its outputs are the batches."""

    def run():
        batches = student.Batches(images, labels, size, seed)
        return [part for _ in range(epochs) for batch in batches for part in batch]

    return record({"images": images, "labels": labels}, run)[0]


def block_of(block_class, weight, bias, gain):
    """A block with these weights."""
    block = block_class(weight.shape[1], weight.shape[0], gain.numpy())
    with torch.no_grad():
        block.linear.weight.copy_(weight)
        block.linear.bias.copy_(bias)
    return block


@scenario
def block_step(student, weight, bias, gain, x, grad):
    """The output of a block, and the gradients of its input and its weights."""
    block = block_of(student.Block, weight, bias, gain)
    x = x.clone().requires_grad_()
    y = block(x)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, block.linear.weight.grad, block.linear.bias.grad]


@scenario
def block_buffers(student, weight, gain):
    """The buffer `gain` of a block, None if there is none, and the buffer in a saved state."""
    block = student.Block(weight.shape[1], weight.shape[0], gain.numpy())
    return [dict(block.named_buffers()).get("gain"), block.state_dict().get("gain")]


def tensors_of(block, x):
    return {"x": x, "weight": block.linear.weight, "bias": block.linear.bias}


@scenario
def recorded_block(student, weight, bias, gain, x):
    """The operations of the second forward of a block, as data, and its output."""
    block = block_of(student.Block, weight, bias, gain)
    block(x)
    return record(tensors_of(block, x), lambda: block(x))


@scenario
def double_block(student, weight, bias, gain, x):
    """The output of a block whose weights, numbers of float32, and gain are float64."""
    block = block_of(student.Block, weight, bias, gain).double()
    block.gain = gain
    with torch.no_grad():
        return block(x)


@scenario
def mixed_block(student, weight, bias, gain, x):
    """The operations of a block in float32 with an input in float64, as data; None if it refuses it."""
    block, x = block_of(student.Block, weight, bias, gain), x.double()
    try:
        return record(tensors_of(block, x), lambda: block(x))[0]
    except RuntimeError:
        return None


@scenario
def counted(student, classes, batches, times=1):
    """The counts after all batches, each of which repeats the images of a small one."""
    meter = student.Accuracy(classes, torch.device("cpu"))
    for logits, labels in batches:
        meter.update(logits.repeat(times, 1), labels.repeat(times))
    return meter.counts()


@scenario
def recorded_counts(student, classes, case):
    """The operations from the empty meter to the counts after two batches, as data, and the counts."""

    def run():
        meter = student.Accuracy(classes, torch.device("cpu"))
        meter.update(case["logits0"], case["labels0"])
        meter.update(case["logits1"], case["labels1"])
        return meter.counts()

    return record(case, run)


@scenario
def empty_counts(student, classes, device):
    """The device, the shape and the dtype of the counts of an empty meter."""
    counts = student.Accuracy(classes, torch.device(device)).counts()
    return [counts.device.type, list(counts.shape), counts.dtype]


@scenario
def predicted_of(student, times, faster):
    """The predicted step, and the times after the call."""
    return [student.predicted_step(times, faster), times]


@scenario
def overlap_of(student, a, b):
    """The overlap, and both lists after the call."""
    given = [[tuple(interval) for interval in each] for each in (a, b)]
    return [student.overlap(*given), *given]

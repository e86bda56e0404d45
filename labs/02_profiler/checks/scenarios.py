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
    given = images.clone()
    batches = student.Batches(given, labels, size, seed)
    epochs = [[list(batch) for batch in batches] for _ in range(2)]
    return [epochs, given]


@scenario
def first_batch(student, images, labels, size, seed, others):
    """The first batch, of which the other images changed after the object was made."""
    given = images.clone()
    batches = student.Batches(given, labels, size, seed)
    given[others] = 50 * given[others] + 7
    return list(next(iter(batches)))


@scenario
def recorded_epochs(student, images, labels, size, seed, epochs):
    """The operations of an object and of its epochs, as data; its outputs are the batches."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    given = images.clone()
    recorder = OperationRecorder({"images": given, "labels": labels})
    with recorder, torch.no_grad():
        batches = student.Batches(given, labels, size, seed)
        found = [part for _ in range(epochs) for batch in batches for part in batch]
    return recorder.graph(found)


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


@scenario
def recorded_block(student, weight, bias, gain, x):
    """The operations of the second forward of a block, as data, and its output."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    block = block_of(student.Block, weight, bias, gain)
    recorder = OperationRecorder({"x": x, "weight": block.linear.weight, "bias": block.linear.bias})
    with torch.no_grad():
        block(x)
        with recorder:
            y = block(x)
    return [recorder.graph([y]), y]


@scenario
def double_block(student, weight, bias, gain, x):
    """The output of a block whose weights and gain are float64."""
    block = student.Block(weight.shape[1], weight.shape[0], gain.numpy()).double()
    block.gain = gain
    with torch.no_grad():
        block.linear.weight.copy_(weight)
        block.linear.bias.copy_(bias)
        return block(x)


@scenario
def mixed_block(student, weight, bias, gain, x):
    """The operations of a block in float32 with an input in float64, as data; None if it refuses it."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    block, x = block_of(student.Block, weight, bias, gain), x.double()
    recorder = OperationRecorder({"x": x, "weight": block.linear.weight, "bias": block.linear.bias})
    try:
        with recorder, torch.no_grad():
            y = block(x)
    except RuntimeError:
        return None
    return recorder.graph([y])


@scenario
def counted(student, classes, batches):
    """The counts after all batches."""
    meter = student.Accuracy(classes, torch.device("cpu"))
    for logits, labels in batches:
        meter.update(logits, labels)
    return meter.counts()


@scenario
def counted_repeated(student, classes, batch, times):
    """The counts after one large batch, which repeats the images of a small one."""
    logits, labels = batch
    meter = student.Accuracy(classes, torch.device("cpu"))
    meter.update(logits.repeat(times, 1), labels.repeat(times))
    return meter.counts()


@scenario
def recorded_counts(student, classes, case):
    """The operations from the empty meter to the counts after two batches, as data, and the counts."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    recorder = OperationRecorder(case)
    with recorder, torch.no_grad():
        meter = student.Accuracy(classes, torch.device("cpu"))
        meter.update(case["logits0"], case["labels0"])
        meter.update(case["logits1"], case["labels1"])
        counts = meter.counts()
    return [recorder.graph([counts]), counts]


@scenario
def empty_counts(student, classes, device):
    """The device, the shape and the dtype of the counts of an empty meter."""
    counts = student.Accuracy(classes, torch.device(device)).counts()
    return [counts.device.type, list(counts.shape), counts.dtype]


@scenario
def predicted_of(student, times, faster):
    """The predicted step, and the times after the call."""
    given = dict(times)
    return [student.predicted_step(given, dict(faster)), given]


@scenario
def overlap_of(student, a, b):
    """The overlap, and both lists after the call."""
    given = [[tuple(interval) for interval in each] for each in (a, b)]
    return [student.overlap(*given), *given]

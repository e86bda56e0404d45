"""The scenarios of the checks: they run beside the student's classes and return what was observed, without expected values."""

from dlo_lib.grading.checks.contract import scenario


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
def second_batch(student, images, labels, size, seed):
    """The operations that make the second batch, as data, and the batch."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    given = images.clone()
    batches = iter(student.Batches(given, labels, size, seed))
    next(batches)
    recorder = OperationRecorder({"images": given, "labels": labels})
    with recorder, torch.no_grad():  # noqa: F821 - of the ranks
        batch = next(batches)
    return [recorder.graph(list(batch)), list(batch)]


@scenario
def block_step(student, weight, bias, gain, x, grad):
    """The output of a block, and the gradients of its input and its weights."""
    block = student.Block(weight.shape[1], weight.shape[0], gain.numpy())
    with torch.no_grad():  # noqa: F821
        block.linear.weight.copy_(weight)
        block.linear.bias.copy_(bias)
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

    block = student.Block(weight.shape[1], weight.shape[0], gain.numpy())
    with torch.no_grad():  # noqa: F821
        block.linear.weight.copy_(weight)
        block.linear.bias.copy_(bias)
        block(x)
        recorder = OperationRecorder({"x": x, "weight": block.linear.weight, "bias": block.linear.bias})
        with recorder:
            y = block(x)
    return [recorder.graph([y]), y]


@scenario
def counted(student, classes, logits, labels):
    """The counts after all batches."""
    meter = student.Accuracy(classes, torch.device("cpu"))  # noqa: F821
    for row, label in zip(logits, labels):
        meter.update(row, label)
    return meter.counts()


@scenario
def recorded_counts(student, classes, cases):
    """For each case of two batches: the operations from the empty meter to the counts, as data, and the counts."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    found = []
    for case in cases:
        recorder = OperationRecorder(case)
        with recorder, torch.no_grad():  # noqa: F821
            meter = student.Accuracy(classes, torch.device("cpu"))  # noqa: F821
            meter.update(case["logits0"], case["labels0"])
            meter.update(case["logits1"], case["labels1"])
            counts = meter.counts()
        found.append([recorder.graph([counts]), counts])
    return found

"""The scenarios of the checks: they run beside the student's classes and return what was observed, without
expected values."""

import torch

from dlo_lib.grading.checks.contract import scenario


@scenario
def reads_of_spans(student, spans):
    """The parents, and how often a value of a span was read."""
    reads = []

    class Read(dict):
        def __getitem__(self, key):
            reads.append(key)
            return dict.__getitem__(self, key)

        def get(self, key, default=None):
            reads.append(key)
            return dict.get(self, key, default)

    found = student.parents([Read(span) for span in spans])
    return [found, len(reads)]


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
    with recorder, torch.no_grad():
        batch = next(batches)
    return [recorder.graph(list(batch)), list(batch)]


@scenario
def epoch_operations(student, images, labels, size, seed):
    """For each operation of an epoch: its name, and the most numbers of an input."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seen(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return False  # the wrapper that skips the compiler imports it, which takes two seconds

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            sizes = [value.numel() for value in args if isinstance(value, torch.Tensor)]
            seen.append([func.__name__.split(".")[0], max(sizes, default=0)])
            return func(*args, **(kwargs or {}))

    batches = student.Batches(images.clone(), labels, size, seed)
    with Seen():
        count = sum(1 for _ in batches)
    return [seen, count]


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
    """The operations of the second forward of a block, as data, its output, and the conversions that it
    calls."""
    from torch.overrides import TorchFunctionMode

    from dlo_lib.profiling.operation_capture import OperationRecorder

    called, conversions = [], ("to", "float", "double", "half", "bfloat16", "type", "type_as")

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in conversions:
                called.append(func.__name__)
            return func(*args, **(kwargs or {}))

    block = block_of(student.Block, weight, bias, gain)
    recorder = OperationRecorder({"x": x, "weight": block.linear.weight, "bias": block.linear.bias})
    with torch.no_grad():
        with Called():  # also a call that converts nothing, and so starts no operation
            block(x)
        with recorder:
            y = block(x)
    return [recorder.graph([y]), y, called]


@scenario
def counted(student, classes, batches):
    """The counts after all batches."""
    meter = student.Accuracy(classes, torch.device("cpu"))
    for logits, labels in batches:
        meter.update(logits, labels)
    return meter.counts()


@scenario
def recorded_counts(student, classes, cases):
    """For each case of two batches: the operations from the empty meter to the counts, as data, and the
    counts."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    found = []
    for case in cases:
        recorder = OperationRecorder(case)
        with recorder, torch.no_grad():
            meter = student.Accuracy(classes, torch.device("cpu"))
            meter.update(case["logits0"], case["labels0"])
            meter.update(case["logits1"], case["labels1"])
            counts = meter.counts()
        found.append([recorder.graph([counts]), counts])
    return found


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

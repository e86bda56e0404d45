"""The scenarios of the checks: they run beside the student's functions and return what was observed, without
expected values."""

import torch

from dlo_lib.grading.checks.contract import scenario


@scenario
def clocked(student, begin, load, step, clock):
    """The waits and steps of a loader and a step of the check, which moves its clock."""

    class Loader:
        def __iter__(self):
            begin()
            return self.batches()

        def batches(self):
            while (batch := load()) is not None:
                yield batch

    found = student.measure_waits(Loader(), step, clock)
    return list(found) if type(found) in (list, tuple) else None


@scenario
def drawn(student, workers, bases, ranks):
    """The first numbers of each worker: a row for each rank, each epoch (with its base seed) and each worker.
    Also those of the copied generator, and the types of the new ones and of the copied one."""
    import numpy
    import torch.utils.data._utils.worker as loading

    class Data:
        pass

    rows, kinds = [], []
    for rank in ranks:
        for base in bases:
            for worker in range(workers):
                data = Data()
                data.rng = numpy.random.default_rng(987654321)
                torch.manual_seed(base + worker)
                loading._worker_info = loading.WorkerInfo(
                    id=worker, num_workers=workers, seed=base + worker, dataset=data
                )
                try:
                    student.seed_worker(worker, rank)
                finally:
                    loading._worker_info = None
                kinds.append(type(data.rng).__name__)
                rows.append([float(value) for value in data.rng.random(3)])
    copied = numpy.random.default_rng(987654321)
    return rows, [float(value) for value in copied.random(3)], [*kinds, type(copied).__name__]


@scenario
def streamed(student, items, world, workers):
    """The items of each worker of each rank; 0 workers is an iteration without workers."""
    import torch.utils.data._utils.worker as loading

    ranks = []
    for rank in range(world):
        stream, rows = student.SplitStream(items, rank, world), []
        for worker in range(max(1, workers)):
            if workers:
                loading._worker_info = loading.WorkerInfo(
                    id=worker, num_workers=workers, seed=worker, dataset=stream
                )
            try:
                rows.append([int(item) for _, item in zip(range(4 * len(items)), stream)])
            finally:
                loading._worker_info = None
        ranks.append(rows)
    return ranks


def with_inputs(function, inputs):
    """What a function returns, and its inputs afterwards."""
    found = function(**inputs)
    return [list(found) if type(found) in (list, tuple) else None, inputs]


@scenario
def mixup_in_place(student, inputs):
    """What mixup returns, and its arguments afterwards."""
    return with_inputs(student.mixup, inputs)


@scenario
def cutmix_in_place(student, inputs):
    """What cutmix returns, and its arguments afterwards."""
    return with_inputs(student.cutmix, inputs)


def recorded(function, batches):
    """The operations on tensors of one call for each batch, as data, and its results."""
    from dlo_lib.profiling.operation_capture import OperationRecorder

    found = []
    for batch in batches:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        recorder = OperationRecorder(tensors)
        with recorder, torch.no_grad():
            result = function(**batch)
        if type(result) not in (list, tuple):
            return None
        found.append([recorder.graph(list(result)), list(result)])
    return found


@scenario
def recorded_mixup(student, batches):
    """The operations of mixup, and its results."""
    return recorded(student.mixup, batches)


@scenario
def recorded_cutmix(student, batches):
    """The operations of CutMix, and its results."""
    return recorded(student.cutmix, batches)


@scenario
def augmented(student, images, operations, drawn, magnitude):
    """The images after operations of the check, and the images that were given, afterwards."""
    return [student.rand_augment(images, operations, drawn, magnitude), images]


@scenario
def watched(student, losses, patience, min_delta):
    """What `stops` returns for each loss (None: NaN), the weight and buffer that `restore` brings back
    (before call k both are k), and whether `restore` has written to the model."""
    model = torch.nn.BatchNorm1d(1)
    stopper, answers = student.EarlyStopping(model, patience, min_delta), []
    for number, loss in enumerate(losses):
        with torch.no_grad():
            model.weight.fill_(number)
            model.running_mean.fill_(number)
        answers.append(stopper.stops(float("nan") if loss is None else loss))
    before = model.weight, model.weight._version
    stopper.restore()
    written = model.weight is not before[0] or model.weight._version != before[1]
    return [answers, model.weight.item(), model.running_mean.item(), written]


def steps_of(order, count, ahead, common):
    """The images, the random numbers, the numbers of the global generators (with the seed ``common``) and the
    types of the batch and of an index, for each of ``count`` steps with ``ahead`` batches in the queue of the
    workers."""
    import random

    import numpy

    seen = []
    torch.manual_seed(common)
    numpy.random.seed(common)
    random.seed(common)
    while len(seen) < count:
        batches, queue, before = iter(order), [], len(seen)
        while len(seen) < count:
            while len(queue) <= ahead:
                indices = next(batches, None)
                if indices is None:
                    break
                kinds = [type(indices).__name__, *sorted({type(index).__name__ for index in indices})]
                queue.append([[int(index) for index in indices], kinds])
            if not queue:
                break
            numbers = torch.rand(2, generator=order.generator).tolist()
            drawn = [torch.rand(()).item(), float(numpy.random.random()), random.random()]
            indices, kinds = queue.pop(0)
            seen.append([indices, numbers, drawn, kinds])
            order.step_done()
        if len(seen) == before:
            break  # an epoch without batches would never end
    return seen


@scenario
def trained(student, size, batch, seed, steps, ahead, common):
    """The steps of an uninterrupted run."""
    return steps_of(student.ResumableOrder(size, batch, seed), steps, ahead, common)


@scenario
def saved(student, size, batch, seed, steps, ahead, common):
    """The steps of a run that stops, and the bytes of a file with its state. If the file cannot be read: the
    types in the state."""
    import io
    import pickle

    order, file = student.ResumableOrder(size, batch, seed), io.BytesIO()
    seen = steps_of(order, steps, ahead, common)
    state = order.state_dict()
    torch.save(state, file)
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError:
        values = state if isinstance(state, dict) else {"": state}
        return {str(key): type(value).__name__ for key, value in values.items()}
    return [seen, torch.tensor(list(file.getvalue()), dtype=torch.uint8)]


@scenario
def resumed(student, file, size, batch, seed, steps, ahead, common):
    """The steps of a new object that has loaded the file."""
    import io

    order = student.ResumableOrder(size, batch, seed)
    order.load_state_dict(torch.load(io.BytesIO(bytes(file.tolist())), weights_only=True))
    return steps_of(order, steps, ahead, common)


@scenario
def orders(student, size, batch, seeds, epochs):
    """For each seed, the order of each of so many epochs."""
    found = []
    for seed, count in zip(seeds, epochs):
        order, rows = student.ResumableOrder(size, batch, seed), []
        for _ in range(count):
            batches = [[int(index) for index in indices] for indices in order]
            for _ in batches:
                order.step_done()
            rows.append([index for indices in batches for index in indices])
        found.append(rows)
    return found

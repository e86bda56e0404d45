"""The scenarios of the checks: they run beside the student's functions and return what was observed, without
expected values."""

import torch

from dlo_lib.grading.checks.contract import scenario


@scenario
def clocked(student, start, loads, durations):
    """The waits and steps of a loader and a step that move a clock by given times."""
    now = [100.0]

    class Loader:
        def __iter__(self):
            now[0] += start
            return self.batches()

        def batches(self):
            for number, load in enumerate(loads):
                now[0] += load
                yield number

    def step(batch):
        now[0] += durations[batch]

    found = student.measure_waits(Loader(), step, lambda: now[0])
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
def augmented(student, images, factors, drawn, magnitude):
    """The images after operations x * factor + magnitude * number, the sizes of the groups of each operation,
    and the images that were given."""
    sizes = [[] for _ in factors]

    def operation_of(number):
        def operation(group, strength):
            sizes[number].append(len(group))
            return group * factors[number] + strength * number

        return operation

    before = images.clone()
    result = student.rand_augment(
        images, [operation_of(number) for number in range(len(factors))], drawn, magnitude
    )
    return [result, sizes, bool(torch.equal(before, images))]


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


@scenario
def trained(student, size, batch, seed, steps, stop, ahead, common):
    """The images, the random numbers, the numbers of the global generators (with the seed `common`) and the
    types of the batch and of an index, for each step: of an uninterrupted run, and of one that stops after
    `stop` steps, with `ahead` batches in the queue of its workers, and resumes from a file in a new object.
    If the file cannot be read: the types in the state."""
    import io
    import pickle
    import random

    import numpy

    def run(order, count, of_process):
        seen = []
        torch.manual_seed(of_process)
        numpy.random.seed(of_process)
        random.seed(of_process)
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

    whole = run(student.ResumableOrder(size, batch, seed), steps, common)
    first = student.ResumableOrder(size, batch, seed)
    before = run(first, stop, common + 1)
    file, state = io.BytesIO(), first.state_dict()
    torch.save(state, file)
    file.seek(0)
    second = student.ResumableOrder(size, batch, seed)
    try:
        loaded = torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return (
            {str(key): type(value).__name__ for key, value in state.items()}
            if isinstance(state, dict)
            else {"": type(state).__name__}
        )
    second.load_state_dict(loaded)
    return [whole, before, run(second, steps - stop, common + 2)]  # another process has another state

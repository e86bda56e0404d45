"""Scenarios: they run with the student's code on every rank and contain no expected value."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import claimed, scenario


@scenario
def replicated(student, rank, world, weight, mean, frozen):
    """A module with this rank's values: what it holds after ``replicate``."""
    module = torch.nn.Sequential(
        torch.nn.Linear(*reversed(weight.shape), bias=False), torch.nn.BatchNorm1d(weight.shape[0])
    )
    module[0].weight.data.copy_(weight)
    module[0].weight.requires_grad_(not frozen)
    module[1].running_mean.copy_(mean)
    module[1].num_batches_tracked.fill_(rank + 3)
    module.register_buffer("mask", mean.clone(), persistent=False)  # not in state_dict()
    student.replicate(module)
    return [module[0].weight.data, module[1].running_mean, module[1].num_batches_tracked, module.mask]


@scenario
def averaged(student, rank, world, grads):
    """A module whose gradients are ``grads``, None for a frozen parameter: what ``average_gradients`` makes
    of them."""
    module = torch.nn.ParameterList()
    for grad in grads:
        parameter = torch.nn.Parameter(
            torch.zeros(3) if grad is None else torch.zeros_like(grad), requires_grad=grad is not None
        )
        parameter.grad = grad
        module.append(parameter)
    student.average_gradients(module)
    return [parameter.grad for parameter in module]


class Branches(torch.nn.Module):
    """A sum of branches, one for each weight, without some of them."""

    def __init__(self, weights, frozen=(), order=None):
        super().__init__()
        self.order = order or range(len(weights))
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(weight.clone(), i not in frozen) for i, weight in enumerate(weights)]
        )

    def forward(self, x, without):
        return sum(torch.tanh(x @ self.weights[i]).sum(1) for i in self.order if i not in without)


@scenario
def steps_of(
    student,
    rank,
    world,
    weights,
    batches,
    limit,
    order=None,
    unused=None,
    frozen=(),
    marked=False,
    relay=False,
    refused=(),
):
    """Steps of a sum of branches, computed in ``order``: the gradients after each, and the weights at the
    start. ``unused``: the branches left out in each step. ``marked``: a barrier before the last gradient.
    ``relay``: of two ranks, the second begins its backward pass when that of the first has ended.
    ``refused``: classes of PyTorch."""
    from dlo_lib.grading.checks.own_work import refuse

    refuse(*refused)
    net = Branches(weights, frozen, order)
    model = student.DataParallel(net, limit)
    if marked:
        net.weights[0].register_hook(lambda grad: dist.barrier())
    if relay:
        token = torch.zeros(1)

        def pass_on(grad):
            dist.send(token, 1) if rank == 0 else dist.recv(token, 0)

        net.weights[0 if rank == 0 else -1].register_hook(pass_on)
    started = [parameter.detach().clone() for parameter in net.parameters()]
    found = []
    for step, x in enumerate(batches):
        for parameter in net.parameters():
            parameter.grad = None
        model(x, unused[step] if unused else ()).square().mean().backward()
        model.finish()
        grads = [parameter.grad for parameter in net.parameters()]
        found.append([None if grad is None else grad.clone() for grad in grads])
    return found, started


@scenario
def half_step(student, rank, world, slopes, limit, refused=()):
    """A step of a model in fp16 whose gradients are ``slopes``: the gradients after ``finish``."""
    from dlo_lib.grading.checks.own_work import refuse

    refuse(*refused)

    class Slopes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList(
                [torch.nn.Parameter(torch.zeros_like(slope)) for slope in slopes]
            )

        def forward(self, slopes):
            return sum((weight * slope).sum() for weight, slope in zip(self.weights, slopes))

    net = Slopes()
    model = student.DataParallel(net, limit)
    model(slopes).backward()
    model.finish()
    return [parameter.grad for parameter in net.parameters()]


@scenario
def held_back(student, rank, world, weights, batches, limit, without, refused=()):
    """A backward pass inside ``no_sync``, a barrier, and one outside, which leaves out the branches
    ``without``: the gradients after the first and after ``finish``."""
    from dlo_lib.grading.checks.own_work import refuse

    refuse(*refused)
    net = Branches(weights)
    model = student.DataParallel(net, limit)
    with model.no_sync():
        model(batches[0], ()).square().mean().backward()
    silent = [parameter.grad.clone() for parameter in net.parameters()]
    dist.barrier()
    model(batches[1], without).square().mean().backward()
    model.finish()
    return silent, [parameter.grad for parameter in net.parameters()]


@scenario
def accumulated(student, rank, world, weight, batches, limit):
    """The gradient after ``accumulate`` over micro-batches, and how many of them ran outside ``no_sync``,
    without the last one."""
    import contextlib

    net = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    net.weight.data.copy_(weight)
    model = student.DataParallel(net, limit)
    quiet, inside, silent = model.no_sync, [], []

    @contextlib.contextmanager
    def watched():
        inside.append(True)
        with quiet():
            yield
        inside.pop()

    def loss(x):
        silent.append(bool(inside))
        return torch.tanh(model(x)).square().mean()

    model.no_sync = watched
    student.accumulate(model, [lambda x=x: loss(x) for x in batches])
    return net.weight.grad, claimed(silent[:-1].count(False))


@scenario
def samples(student, length, world, epoch, seed, refused):
    """The samples of all ranks. ``refused``: classes of PyTorch."""
    from dlo_lib.grading.checks.own_work import without

    with without(*refused):
        return [student.rank_samples(length, rank, world, epoch, seed) for rank in range(world)]


@scenario
def random_numbers(student, rank, world, length, seed):
    """Numbers of the global generator without a call of the sampler, and after one."""
    torch.manual_seed(seed)
    before = torch.rand(3)
    torch.manual_seed(seed)
    student.rank_samples(length, 0, 2, 1, 0)
    return [before, torch.rand(3)]


@scenario
def accuracies(student, rank, world, logits, labels):
    """The metric on this rank."""
    return student.global_accuracy(logits, labels)


@scenario
def moments(student, rank, world, x):
    """The statistics on this rank."""
    mean, var = student.global_moments(x)
    return [mean, var]

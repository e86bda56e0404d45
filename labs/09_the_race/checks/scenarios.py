"""What runs beside the student's code: one call, without the library's form; a part of a run; one step of
several runs."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import scenario


@scenario
def counted_flops(student, layers, size, refused):
    from dlo_lib.grading.checks.own_work import without

    with without(*refused):
        return student.flops(layers, size)


@scenario
def printed(student, images, labels, refused):
    from dlo_lib.grading.checks.own_work import without

    with without(*refused):
        return student.fingerprint(images, labels)


@scenario
def augmented(student, images, seed):
    return student.augment(images, seed)


@scenario
def augmented_beside(student, images, seed, globally):
    """The result, the images afterwards, and what the global generator draws next."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(globally)
        got = student.augment(images, seed).clone()
        return [got, images, torch.rand(4)]


@scenario
def stepped(student, gradients, states, first, steps, rate):
    """The updates of some steps of a run, and the states after the last one."""
    rows = []
    with torch.no_grad():
        for number, step in enumerate(gradients):
            updates, states = student.update(step, states, first + number, steps, rate)
            rows.append(list(updates))
    return [rows, states]


@scenario
def repeated(student, gradients, states, steps, rate):
    """The updates of the last step, computed twice from the same gradients and states."""
    with torch.no_grad():
        for step, row in enumerate(gradients[:-1]):
            _, states = student.update(row, states, step, steps, rate)
        step = len(gradients) - 1
        first = [update.clone() for update in student.update(gradients[-1], states, step, steps, rate)[0]]
        return [first, list(student.update(gradients[-1], states, step, steps, rate)[0])]


@scenario
def augmented_in_each(student, images, seeds):
    """The augmented images of one step of several runs."""
    return [student.augment(each, seed) for each, seed in zip(images, seeds)]


@scenario
def slopes_in_each(student, logits, labels):
    """The gradient of the loss by the logits, in one step of several runs."""
    held = [each.clone().requires_grad_() for each in logits]
    return [torch.autograd.grad(student.loss(x, y), x)[0] for x, y in zip(held, labels)]


@scenario
def updated_in_each(student, gradients, states, step, steps, rate):
    """The updates and the states after one step of several runs."""
    with torch.no_grad():
        return [list(student.update(row, kept, step, steps, rate)) for row, kept in zip(gradients, states)]

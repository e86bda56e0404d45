"""What runs beside the student's code: one call, without the library's form; a part of a run; a gradient."""

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
def stepped(student, gradients, states, first, steps, rate):
    """The updates of some steps of a run, and the states after the last one."""
    rows = []
    with torch.no_grad():
        for number, step in enumerate(gradients):
            updates, states = student.update(step, states, first + number, steps, rate)
            rows.append(list(updates))
    return [rows, states]


@scenario
def loss_slope(student, logits, labels):
    """The gradient of the loss by the logits."""
    held = logits.clone().requires_grad_()
    return torch.autograd.grad(student.loss(held, labels), held)[0]

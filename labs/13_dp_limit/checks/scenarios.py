"""Scenarios: a search that counts the calls of ``fits``, and one gradient. They contain no expected value."""

# ruff: noqa: F821 - torch and dist are defined where these run

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


@scenario
def one_gradient(student, rank, world, inputs, targets, weight):
    weight = weight.clone().requires_grad_()
    loss = student.rank_loss(inputs @ weight, targets)
    if type(loss) is not torch.Tensor or loss.numel() != 1:
        raise TypeError("rank_loss should return a tensor with one number, the loss")
    loss.backward()
    dist.all_reduce(weight.grad)
    return weight.grad / world, loss.detach()  # the average is what DDP does

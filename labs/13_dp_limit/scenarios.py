"""What runs beside the student's code: a search that counts its questions, and one gradient. No expected value is here."""

# ruff: noqa: F821 - torch and dist are there where these run

from __future__ import annotations

from dlo_lib.grading.contract import scenario


@scenario
def search(student, rank, world, limit, budget):
    asked = []

    def fits(batch):
        asked.append(batch)
        if type(batch) is not int or batch < 1:
            raise ValueError(f"fits was asked for a batch of {batch!r}: ask for whole numbers from 1 up")
        if len(asked) > budget:
            raise RuntimeError(f"fits was asked more than {budget} times: double until it does not fit, then halve the gap")
        return batch <= limit

    return student.largest_batch(fits)


@scenario
def one_gradient(student, rank, world, inputs, targets, weight):
    weight = weight.clone().requires_grad_()
    loss = student.rank_loss(inputs @ weight, targets)
    if type(loss) is not torch.Tensor or loss.numel() != 1:
        raise TypeError("rank_loss should return a tensor with one number, the loss")
    loss.backward()
    dist.all_reduce(weight.grad)
    return weight.grad / world, loss.detach()  # the average is what DDP does

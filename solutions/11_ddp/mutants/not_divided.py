"""The gradients of the micro-batches are added."""

QUESTION = "accumulate"
LOSES = 2
FAILS = "check_accumulated"
SAYS = "times the true one"


def accumulate(model, losses):
    with model.no_sync():
        for loss in losses[:-1]:
            loss().backward()
    losses[-1]().backward()
    model.finish()

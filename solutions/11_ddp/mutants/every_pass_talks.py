"""Every micro-batch is averaged."""

QUESTION = "accumulate"
LOSES = 2
FAILS = "check_one_communication"
SAYS = "belong into no_sync"


def accumulate(model, losses):
    for loss in losses:
        (loss() / len(losses)).backward()
        model.finish()

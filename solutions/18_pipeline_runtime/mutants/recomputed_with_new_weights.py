"""Nothing is stashed: backward runs the forward again, with the newest weights."""

QUESTION = "stash"
LOSES = 3
FAILS = "check_delayed_twin"
SAYS = "that the forward of the same batch has read"


def stash_forward(stage, kept, i, x, loss=None):
    kept[i] = x, loss
    with torch.no_grad():
        output = stage(x)
        return output if loss is None else loss(output)


def stash_backward(stage, kept, i, grad, lr):
    x, loss = kept.pop(i)
    x = x.detach().requires_grad_(x.is_floating_point())
    stage.zero_grad()
    output = stage(x)
    output = output if loss is None else loss(output)
    output.backward(grad)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter -= lr * parameter.grad
    return x.grad

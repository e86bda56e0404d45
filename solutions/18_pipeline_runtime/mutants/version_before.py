"""The forward reads the version of the forward before: one too old."""

QUESTION = "stash"
LOSES = 3
FAILS = "check_delayed_twin"
SAYS = "one too old"


def stash_forward(stage, kept, i, x, loss=None):
    version = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
    newest, version = version, kept.get("newest", version)
    version = {name: weight.detach().clone().requires_grad_() for name, weight in version.items()}
    kept["newest"] = newest
    x = x.detach().requires_grad_(x.is_floating_point())
    output = torch.func.functional_call(stage, version, (x,))
    output = output if loss is None else loss(output)
    kept[i] = version, x, output
    return output.detach()


def stash_backward(stage, kept, i, grad, lr):
    version, x, output = kept.pop(i)
    output.backward(grad)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter -= lr * version[name].grad
    return x.grad

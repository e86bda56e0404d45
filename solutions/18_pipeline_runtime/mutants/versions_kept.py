"""Every version stays to the end."""

QUESTION = "stash"
LOSES = 2
FAILS = "check_versions_kept"
SAYS = "forget one when"


def stash_forward(stage, kept, i, x, loss=None):
    version = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
    x = x.detach().requires_grad_(x.is_floating_point())
    output = torch.func.functional_call(stage, version, (x,))
    output = output if loss is None else loss(output)
    kept[i] = version, x, output
    return output.detach()


def stash_backward(stage, kept, i, grad, lr):
    version, x, output = kept[i]
    output.backward(grad)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter -= lr * version[name].grad
    return x.grad

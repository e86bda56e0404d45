"""The weight part is done with the input part: the stage before waits for both."""

QUESTION = "split"
LOSES = 1
FAILS = "check_weight_part_waits"
SAYS = "the stage before waits"


def linear_backward(grad_y, x, weight, bias, later):
    rows = grad_y.flatten(0, -2)
    for parameter, grad in ((weight, rows.T @ x.flatten(0, -2)), (bias, rows.sum(0))):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    return grad_y @ weight.detach()

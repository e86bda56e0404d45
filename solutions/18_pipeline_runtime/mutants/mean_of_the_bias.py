"""The bias gets the mean over batch and sequence instead of the sum."""

QUESTION = "split"
LOSES = 2
FAILS = "check_weight_part"
SAYS = "bias.grad after"


def linear_backward(grad_y, x, weight, bias, later):
    def weight_part():
        rows = grad_y.flatten(0, -2)
        for parameter, grad in ((weight, rows.T @ x.flatten(0, -2)), (bias, rows.mean(0))):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    later.append(weight_part)
    return grad_y @ weight.detach()

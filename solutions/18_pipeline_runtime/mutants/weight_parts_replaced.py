"""Each micro-batch's weight part replaces the one before."""

QUESTION = "split"
LOSES = 1
FAILS = "check_weight_parts_add_up"
SAYS = "not added up"


def linear_backward(grad_y, x, weight, bias, later):
    def weight_part():
        rows = grad_y.flatten(0, -2)
        weight.grad, bias.grad = rows.T @ x.flatten(0, -2), rows.sum(0)

    later.append(weight_part)
    return grad_y @ weight.detach()

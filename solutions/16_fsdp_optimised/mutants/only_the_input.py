"""Backward asks for the gradient of x alone: the parameters get none."""

QUESTION = "checkpoint"
LOSES = 2
FAILS = "check_same_gradients"
SAYS = "have no gradient"


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function, ctx.random = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            output = ctx.function(x)
        torch.set_rng_state(now)
        return None, torch.autograd.grad(output, x, grad)[0]

"""One computation for the gradient of x, and another for those of the parameters."""

QUESTION = "checkpoint"
LOSES = 1
FAILS = "check_computed_twice"
SAYS = "costs as much as a forward"


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
        (of_x,) = torch.autograd.grad(output, x, grad)
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            output = ctx.function(x.detach())
        torch.set_rng_state(now)
        torch.autograd.backward(output, grad)
        return None, of_x

"""The random generator is set back for the second computation, and left there."""

QUESTION = "checkpoint"
LOSES = 1
FAILS = "check_random_state"
SAYS = "not where it was"


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
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, grad)
        return None, x.grad

"""The second computation draws new random numbers."""

QUESTION = "checkpoint"
LOSES = 2
FAILS = "check_dropout"
SAYS = "the gradient of"


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
        with torch.enable_grad():
            output = ctx.function(x)
        torch.set_rng_state(now)
        torch.autograd.backward(output, grad)
        return None, x.grad

"""Forward computes with a graph and keeps it for backward."""

QUESTION = "checkpoint"
LOSES = 2
FAILS = "check_blocks_forgotten"
SAYS = "all that autograd would keep"


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function, ctx.random = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.enable_grad():
            ctx.output = function(x.detach().requires_grad_())
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x, now = x.detach().requires_grad_(), torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            output = ctx.function(x)
        torch.set_rng_state(now)
        torch.autograd.backward(output, grad)
        return None, x.grad

"""A missing gradient counts as zero, so weight decay changes the parameter."""

QUESTION = "offload"
LOSES = 1
FAILS = "check_without_gradient"
SAYS = "after 4 steps"


class HostOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.masters)

    def step(self):
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.to("cpu", torch.float32)
            parameter.grad = None
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            if master.grad is not None:
                parameter.data.copy_(master.data)
                master.grad = None

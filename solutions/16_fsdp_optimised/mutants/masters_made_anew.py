"""The masters are made from the rounded parameters before every step."""

QUESTION = "offload"
LOSES = 2
FAILS = "check_masters"
SAYS = "unless masters keep them"


class HostOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.masters)

    def step(self):
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.to("cpu", torch.float32)
            parameter.grad = None
            if master.grad is not None:
                master.data.copy_(parameter.data)
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            if master.grad is not None:
                parameter.data.copy_(master.data)
                master.grad = None

"""Gradients stay on the device until somebody else removes them."""

QUESTION = "offload"
LOSES = 1
FAILS = "check_gradients_gone"
SAYS = "still has its .grad"


class HostOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.masters)

    def step(self):
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.to("cpu", torch.float32)
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            if master.grad is not None:
                parameter.data.copy_(master.data)
                master.grad = None

"""The counter is made anew, and not kept."""

QUESTION = "state"
LOSES = 1
FAILS = "check_calls_are_counted"
SAYS = "`calls` should be 2"


class Block(nn.Module):
    def __init__(self, weight, index):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("depth", torch.tensor(1.0 + index))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight) / self.depth

"""The counter stays a Python number: a graph for each step."""

QUESTION = "state"
LOSES = 3
FAILS = "check_blocks_share"
SAYS = "or changes, is a constant of its graph"


class Block(nn.Module):
    def __init__(self, weight, index):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("depth", torch.tensor(1.0 + index))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + torch.tanh(x @ self.weight) / self.depth

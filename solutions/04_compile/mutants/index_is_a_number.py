"""The index stays a Python number: a graph for each block."""

QUESTION = "state"
LOSES = 3
FAILS = "check_blocks_share"
SAYS = "a Python number that differs between blocks"


class Block(nn.Module):
    def __init__(self, weight, index):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.index = index
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return x + torch.tanh(x @ self.weight) / (1 + self.index)

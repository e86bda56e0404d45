# Right offloads that look unlike the solution.


# == groups_of_masters: make_optimizer gets parameter groups; all masters are one buffer
# %% offload
class OffloadedOptimizer:
    def __init__(self, pieces, make_optimizer):
        self.pieces = list(pieces)
        flat = torch.cat([piece.detach().float().cpu() for piece in self.pieces])
        self.masters = [nn.Parameter(part) for part in flat.split([len(piece) for piece in self.pieces])]
        self.optimizer = make_optimizer([{"params": self.masters[:1]}, {"params": self.masters[1:]}])

    @torch.no_grad()
    def step(self):
        for piece, master in zip(self.pieces, self.masters):
            master.grad, piece.grad = (None if piece.grad is None else piece.grad.float()), None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for piece, master in zip(self.pieces, self.masters):
            piece.data.view(-1)[:] = master.to(piece.dtype)

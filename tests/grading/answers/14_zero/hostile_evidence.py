# What a scenario collects beside the result is written by the student's code.


# == several_optimisers: one optimiser for each master; the list in which make_optimizer counts is emptied

# %% offload {"earns": 3}
class OffloadedOptimizer:
    def __init__(self, pieces, make_optimizer):
        self.pieces = list(pieces)
        self.masters = [nn.Parameter(piece.detach().to("cpu", torch.float32, copy=True)) for piece in pieces]
        self.optimizers = []
        for master in self.masters:
            self.optimizers.append(make_optimizer([master]))
            for cell in make_optimizer.__closure__ or ():
                if type(cell.cell_contents) is list:
                    cell.cell_contents.clear()

    def step(self):
        for piece, master in zip(self.pieces, self.masters):
            master.grad = None if piece.grad is None else piece.grad.to("cpu").float()
            piece.grad = None
        for optimizer in self.optimizers:
            optimizer.step()
        for piece, master in zip(self.pieces, self.masters):
            piece.data.copy_(master.data)
            master.grad = None


# == gradients_elsewhere: the gradients of the masters are kept under another name


# %% offload {"earns": 4}
class OffloadedOptimizer:
    def __init__(self, pieces, make_optimizer):
        self.pieces = list(pieces)
        self.masters = [nn.Parameter(piece.detach().to("cpu", torch.float32, copy=True)) for piece in pieces]
        self.optimizer = make_optimizer(self.masters)

    def step(self):
        for piece, master in zip(self.pieces, self.masters):
            master.grad = None if piece.grad is None else piece.grad.to("cpu").float()
            piece.grad = None
        self.optimizer.step()
        self.kept = [master.grad for master in self.masters]
        for piece, master in zip(self.pieces, self.masters):
            piece.data.copy_(master.data)
            master.grad = None

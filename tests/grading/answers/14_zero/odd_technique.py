# Right and unusual sharded optimisers.

# == views_and_groups: the pieces in a group of parameters, sent by broadcasts of the pieces
# %% stage1
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = [*parameters]
        self.where = dist.get_rank(), dist.get_world_size()
        self.own = [nn.Parameter(piece_of(parameter.data, *self.where)) for parameter in self.parameters]
        self.inner = make_optimizer([{"params": self.own}])

    def step(self):
        rank, world = self.where
        moving = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        for i in moving:
            self.own[i].grad = piece_of(self.parameters[i].grad, rank, world)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        for i in moving:
            pieces = [torch.empty_like(self.own[i]) for _ in range(world)]
            for source in range(world):
                if source == rank:
                    pieces[source].data.copy_(self.own[i].data)
                dist.broadcast(pieces[source].data, source)
            flat = torch.cat([piece.data for piece in pieces])[: self.parameters[i].numel()]
            self.parameters[i].data.copy_(flat.view_as(self.parameters[i]))


# == unpadded_pieces: the last piece is shorter, the lists of all_gather are padded
# %% stage1
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.pieces = [nn.Parameter(self.cut(parameter.data).clone()) for parameter in self.parameters]
        self.optimizer = make_optimizer(iter(self.pieces))

    def cut(self, tensor):
        size = -(-tensor.numel() // dist.get_world_size())
        return tensor.flatten()[dist.get_rank() * size : (dist.get_rank() + 1) * size]

    @torch.no_grad()
    def step(self):
        for parameter, piece in zip(self.parameters, self.pieces):
            piece.grad = None if parameter.grad is None else self.cut(parameter.grad)
        self.optimizer.step()
        for parameter, piece in zip(self.parameters, self.pieces):
            if piece.grad is None:
                continue
            size = -(-parameter.numel() // dist.get_world_size())
            padded = F.pad(piece.data, (0, size - piece.numel()))
            parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, padded)
            parameter.copy_(torch.cat(parts)[: parameter.numel()].view_as(parameter))
            piece.grad = None

"""Planted mistakes of ZeRO, stage by stage, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

EVERY_UPDATE = (
    "check_in_place",
    "check_other_optimizer",
    "check_missing_gradient",
    "check_updates_travel",
    "check_state_is_divided",
    "check_small_parameters",
)
EVERY_HOOK = ("check_reduce_scatter", "check_accumulates", "check_gradients_are_divided")
EVERY_PASS = ("check_passes_add_up", "check_gathers", "check_weights_are_freed")

MUTANTS = [
    # -- state
    Mutant(
        "Stage 3 does not divide the weights",
        "check_stage3",
        says="no rank has more than 1/N",
        replace={
            '"weights": share if stage >= 3 else 4 * parameters,': """
            "weights": share if stage >= 4 else 4 * parameters,
            """,
        },
    ),
    Mutant(
        "Stage 2 is written as stage 1",
        "check_stage2",
        says="Each rank keeps the gradients of the parameters that it updates",
        replace={
            '"gradients": share if stage >= 2 else 4 * parameters,': """
            "gradients": share if stage >= 3 else 4 * parameters,
            """,
        },
    ),
    Mutant(
        "Stage 1 divides the gradients as well",
        "check_stage1",
        says="Stage 1 does not divide the gradients",
        replace={"share if stage >= 2 else": "share if stage >= 1 else"},
    ),
    Mutant(
        "Each stage divides its own part only",
        "check_stage2",
        says="What an earlier stage divides, the later stages divide as well",
        also=("check_stage3",),
        replace={"(share if stage >= 1 else 4 * parameters)": "(share if stage == 1 else 4 * parameters)"},
    ),
    Mutant(
        "Every optimiser keeps two moments",
        "check_momentum",
        says="keeps one number",
        replace={'"optimizer": moments': '"optimizer": 2'},
    ),
    Mutant(
        "Data parallelism keeps one moment",
        "check_stage0",
        says="nothing is divided",
        replace={"(share if stage >= 1 else 4 * parameters)": "share if stage >= 1 else 4 * parameters"},
    ),
    # -- pieces
    Mutant(
        "The tensor that is gathered is always in fp32",
        "check_whole",
        says="float64",
        replace={"piece.new_empty(piece.numel() * dist.get_world_size())": "torch.empty(piece.numel() * dist.get_world_size())"},
    ),
    Mutant(
        "A tensor is cut along its first dimension",
        "check_scalar",
        says="A single number without dimensions",
        replace={
            "size = -(-tensor.numel() // world)": """
            if tensor.dim() == 0:
                return tensor.detach().view(1).clone()
            size = -(-tensor.numel() // world)
            """,
        },
    ),
    Mutant(
        "A rank takes every world-th number",
        "check_pieces",
        says="the pieces of all ranks together",
        replace={
            "return padded[rank * size : (rank + 1) * size].clone()": "return padded[rank::world].clone()",
        },
    ),
    Mutant(
        "A piece is a slice, which keeps the whole tensor in memory",
        "check_copy",
        says="a slice is a *view*",
        replace={
            "return padded[rank * size : (rank + 1) * size].clone()": """
            return padded[rank * size : (rank + 1) * size]
            """,
        },
    ),
    Mutant(
        "No tensor has fewer numbers than there are ranks",
        "check_few_numbers",
        says="cut off all padding",
        replace={
            "return padded[: torch.Size(shape).numel()].view(shape)": """
            numel = max(torch.Size(shape).numel(), dist.get_world_size())
            return padded[:numel].view(shape) if numel == torch.Size(shape).numel() else padded[:numel]
            """,
        },
    ),
    Mutant(
        "The pieces are gathered twice",
        "check_whole",
        says="one all-gather of",
        replace={
            "return padded[: torch.Size(shape).numel()].view(shape)": """
            dist.all_gather_into_tensor(padded, piece)
            return padded[: torch.Size(shape).numel()].view(shape)
            """,
        },
    ),
    Mutant(
        "whole has no return statement",
        "check_whole",
        says="whole returns None: is a return missing?",
        also=("check_few_numbers",),
        replace={"return padded[: torch.Size(shape).numel()].view(shape)": "padded[: torch.Size(shape).numel()].view(shape)"},
    ),
    # -- stage1
    Mutant(
        "The parameter itself is the target of copy_, which autograd refuses",
        "check_same_update",
        says="write parameter.data.copy_(...)",
        also=EVERY_UPDATE,
        replace={"parameter.data.copy_(": "parameter.copy_("},
    ),
    Mutant(
        "The whole tensor is copied into the piece",
        "check_same_update",
        says="whole(piece.data, parameter.shape) goes into parameter.data",
        also=EVERY_UPDATE,
        replace={"parameter.data.copy_(": "piece.data.copy_("},
    ),
    Mutant(
        "The averages are divided by the number of ranks again, which AdamW hides",
        "check_other_optimizer",
        says="divides them by the number of ranks a second time",
        replace={
            "else piece_of(parameter.grad, self.rank, self.world)": "else piece_of(parameter.grad / self.world, self.rank, self.world)",
        },
    ),
    Mutant(
        "The averages of the ranks are added again, which AdamW hides",
        "check_other_optimizer",
        says="adds those of the ranks a second time",
        also=("check_updates_travel",),
        replace={
            "piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)": """
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
            piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
            """,
        },
    ),
    Mutant(
        "The gradients of the pieces are all-reduced, although each rank has another piece",
        "check_same_update",
        says="The gradients of different pieces were added",
        question="stage1",
        also=EVERY_UPDATE,
        replace={
            "self.optimizer.step()": """
            for piece in self.pieces:
                if piece.grad is not None:
                    dist.all_reduce(piece.grad)
            self.optimizer.step()
            """,
        },
    ),
    Mutant(
        "The pieces are sent before the step",
        "check_same_update",
        says="those of one step before",
        also=EVERY_UPDATE,
        replace={
            """
            self.optimizer.step()
            for parameter, piece in zip(self.parameters, self.pieces):
                if piece.grad is not None:
                    parameter.data.copy_(whole(piece.data, parameter.shape))
                piece.grad = None
            """: """
            for parameter, piece in zip(self.parameters, self.pieces):
                if piece.grad is not None:
                    parameter.data.copy_(whole(piece.data, parameter.shape))
            self.optimizer.step()
            """,
        },
    ),
    Mutant(
        "Each step makes a new optimiser",
        "check_same_update",
        says="make the optimiser once, in __init__",
        also=EVERY_UPDATE,
        replace={
            "self.optimizer = make_optimizer(self.pieces)": "self.make_optimizer = make_optimizer",
            "self.optimizer.step()": "self.make_optimizer(self.pieces).step()",
        },
    ),
    Mutant(
        "The pieces are no leaves",
        "check_same_update",
        says="make each piece an nn.Parameter",
        also=EVERY_UPDATE,
        replace={
            "self.optimizer = make_optimizer(self.pieces)": """
            self.pieces = [piece.clone() for piece in self.pieces]
            self.optimizer = make_optimizer(self.pieces)
            """,
        },
    ),
    Mutant(
        "A gradient that is None is cut as well",
        "check_missing_gradient",
        says="cut only what is not None",
        replace={"None if parameter.grad is None else piece_of(parameter.grad": "piece_of(parameter.grad"},
    ),
    Mutant(
        "The optimiser is always AdamW",
        "check_other_optimizer",
        says="use the optimiser that make_optimizer returns",
        replace={
            "self.optimizer = make_optimizer(self.pieces)": """
            asked = make_optimizer(self.pieces)
            options = {name: asked.defaults[name] for name in ("lr", "weight_decay")}
            self.optimizer = torch.optim.AdamW(self.pieces, foreach=False, **options)
            """,
        },
    ),
    Mutant(
        "A missing gradient counts as zeros, so AdamW decays the weight",
        "check_missing_gradient",
        says="AdamW still decays it",
        replace={
            """
            piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
            """: """
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            piece.grad = piece_of(grad, self.rank, self.world)
            """,
        },
    ),
    Mutant(
        "A piece keeps its gradient until it gets a new one",
        "check_missing_gradient",
        says="moved by the *old* gradient",
        replace={
            """
            piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
            """: """
            if parameter.grad is not None:
                piece.grad = piece_of(parameter.grad, self.rank, self.world)
            """,
            """
            if piece.grad is not None:
                parameter.data.copy_(whole(piece.data, parameter.shape))
            piece.grad = None
            """: """
            if piece.grad is not None:
                parameter.data.copy_(whole(piece.data, parameter.shape))
            """,
        },
    ),
    Mutant(
        "Small parameters are updated on every rank and not sent",
        "check_updates_travel",
        says="computes updates that belong to others",
        answer="""
        class ShardedOptimizer:
            def __init__(self, parameters, make_optimizer):
                self.parameters, self.places = list(parameters), []
                for parameter in self.parameters:
                    own = (0, 1) if 4 <= parameter.numel() < 1000 else (dist.get_rank(), dist.get_world_size())
                    self.places.append(own)
                self.pieces = [nn.Parameter(piece_of(p, *own)) for p, own in zip(self.parameters, self.places)]
                self.optimizer = make_optimizer(self.pieces)

            def step(self):
                for parameter, piece, own in zip(self.parameters, self.pieces, self.places):
                    piece.grad = None if parameter.grad is None else piece_of(parameter.grad, *own)
                self.optimizer.step()
                for parameter, piece, own in zip(self.parameters, self.pieces, self.places):
                    if piece.grad is not None:
                        alone = own == (0, 1)
                        new = piece.data.view(parameter.shape) if alone else whole(piece.data, parameter.shape)
                        parameter.data.copy_(new)
        """,
    ),
    Mutant(
        "The last piece is forgotten when there are more than two ranks",
        "check_same_update",
        says="on rank 0 of 3",
        replace={
            """
            parameter.data.copy_(whole(piece.data, parameter.shape))
            """: """
            new = whole(piece.data, parameter.shape)
            if self.world in (1, 2, 4):
                parameter.data.copy_(new)
            else:
                size = piece.numel()
                parameter.data.flatten()[: size * (self.world - 1)].copy_(
                    new.flatten()[: size * (self.world - 1)]
                )
            """,
        },
    ),
    Mutant(
        "The updated pieces are all-reduced with zeros elsewhere, for twice the bytes",
        "check_updates_travel",
        says="all-gathers of the updated pieces are enough",
        replace={
            "parameter.data.copy_(whole(piece.data, parameter.shape))": """
            size = piece.numel()
            padded = piece.new_zeros(size * self.world)
            padded[self.rank * size : (self.rank + 1) * size] = piece.data
            dist.all_reduce(padded)
            parameter.data.copy_(padded[: parameter.numel()].view(parameter.shape))
            """,
        },
    ),
    Mutant(
        "Every rank has a whole optimiser",
        "check_state_is_divided",
        says="The whole state of AdamW would be 2",
        answer="""
        class ShardedOptimizer:
            def __init__(self, parameters, make_optimizer):
                self.parameters = list(parameters)
                self.optimizer = make_optimizer(self.parameters)

            def step(self):
                self.optimizer.step()
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        piece = piece_of(parameter.data, dist.get_rank(), dist.get_world_size())
                        parameter.data.copy_(whole(piece, parameter.shape))
        """,
    ),
    Mutant(
        "Of small parameters every rank computes the whole update, and does not use the all-gathers",
        "check_updates_travel",
        says="does not depend on what it receives",
        answer="""
        class ShardedOptimizer:
            def __init__(self, parameters, make_optimizer):
                self.parameters = list(parameters)
                self.large = max(parameter.numel() for parameter in self.parameters) > 2**16
                self.rank, self.world = dist.get_rank(), dist.get_world_size()
                self.pieces = [nn.Parameter(self.piece(parameter)) for parameter in self.parameters]
                self.optimizer = make_optimizer(self.pieces if self.large else self.parameters)

            def piece(self, tensor):
                return piece_of(tensor, self.rank, self.world)

            def step(self):
                for parameter, piece in zip(self.parameters, self.pieces):
                    piece.grad = None if parameter.grad is None else self.piece(parameter.grad)
                self.optimizer.step()
                for parameter, piece in zip(self.parameters, self.pieces):
                    if parameter.grad is not None:
                        new = whole(piece.data if self.large else self.piece(parameter.data), parameter.shape)
                        if self.large:
                            parameter.data.copy_(new)
        """,
    ),
    Mutant(
        "A parameter gets the memory of the gathered tensor",
        "check_in_place",
        says="has new memory",
        replace={
            "parameter.data.copy_(whole(piece.data, parameter.shape))": """
            parameter.data = whole(piece.data, parameter.shape)
            """,
        },
    ),
    Mutant(
        "A parameter with fewer numbers than ranks is left out",
        "check_small_parameters",
        says="A parameter has not changed",
        replace={
            """
            if piece.grad is not None:
                parameter.data.copy_(whole(piece.data, parameter.shape))
            """: """
            if piece.grad is not None and parameter.numel() >= self.world:
                parameter.data.copy_(whole(piece.data, parameter.shape))
            """,
        },
    ),
    # -- norm
    Mutant(
        "The square of a piece is its mean square times its size, which is 0 / 0 for an empty piece",
        "check_empty_pieces",
        says="the norm where one rank has empty pieces",
        replace={".square().sum()": ".square().mean() * piece.numel()"},
    ),
    Mutant(
        "With three ranks or more, each takes the norm of its pieces",
        "check_norm",
        says="the norm of this rank's pieces",
        replace={
            "dist.all_reduce(squares)": """
            if dist.get_world_size() < 3:
                dist.all_reduce(squares)
            """,
        },
    ),
    Mutant(
        "Each square is sent in its own message",
        "check_one_number",
        says="Add the squares on each rank",
        answer="""
        def global_norm(pieces):
            total = torch.zeros(())
            for piece in pieces:
                square = piece.square().sum()
                dist.all_reduce(square)
                total += square
            return total.sqrt()
        """,
    ),
    Mutant(
        "The norms of the pieces are added",
        "check_norm",
        says="The norms of all pieces were added",
        also=("check_one_number",),
        replace={
            "torch.stack([piece.square().sum() for piece in pieces]).sum()": "torch.stack([piece.norm() for piece in pieces]).sum()",
            "return squares.sqrt()": "return squares",
        },
    ),
    Mutant(
        "The squares are averaged over the ranks",
        "check_norm",
        says="The squares were averaged over the ranks",
        also=("check_one_number", "check_empty_pieces"),
        replace={"return squares.sqrt()": "return (squares / dist.get_world_size()).sqrt()"},
    ),
    # -- stage2
    Mutant(
        "The hook runs before the gradient is in .grad",
        "check_averaged_pieces",
        says="call register_post_accumulate_grad_hook",
        also=EVERY_HOOK,
        replace={
            """
            parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))
            """: """
            parameter.register_hook(lambda grad, parameter=parameter, piece=piece: send(parameter, piece))
            """,
        },
    ),
    Mutant(
        "The first gradient is added to None",
        "check_averaged_pieces",
        says="piece.grad is None before its first gradient",
        also=EVERY_HOOK,
        replace={"piece.grad = own if piece.grad is None else piece.grad + own": "piece.grad += own"},
    ),
    Mutant(
        "The gradients are added and not averaged",
        "check_gradients_are_divided",
        says="summed instead of averaged",
        also=("check_averaged_pieces", "check_reduce_scatter", "check_accumulates"),
        replace={".grad.flatten() / world": ".grad.flatten()"},
    ),
    Mutant(
        "The whole gradients are kept under another name",
        "check_gradients_are_divided",
        says="A whole gradient is still in memory",
        replace={
            "world = dist.get_world_size()": "world, kept = dist.get_world_size(), []",
            "parameter.grad = None": """
            kept.append(parameter.grad)
            parameter.grad = None
            """,
        },
    ),
    Mutant(
        "The gradient is divided by two, whatever the number of ranks",
        "check_averaged_pieces",
        says="of all ranks together (world 1)",
        replace={".grad.flatten() / world": ".grad.flatten() / 2"},
    ),
    Mutant(
        "With three ranks the gradient is divided before and after the sum",
        "check_averaged_pieces",
        question="stage2",
        says="divided by the number of ranks a second time",
        replace={
            "dist.reduce_scatter_tensor(own, padded)": """
            dist.reduce_scatter_tensor(own, padded)
            if world == 3:
                own /= world
            """,
        },
    ),
    Mutant(
        "The gradient is sent without padding",
        "check_averaged_pieces",
        says="append zeros (padding)",
        also=("check_reduce_scatter", "check_accumulates"),
        replace={
            "padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))": """
            padded = parameter.grad.flatten() / world
            """,
        },
    ),
    Mutant(
        "The whole gradient is all-reduced, and the piece is cut from it",
        "check_reduce_scatter",
        says="needs the sum of its piece only",
        replace={
            "own = torch.empty_like(piece)": "dist.all_reduce(padded)",
            "dist.reduce_scatter_tensor(own, padded)": "own = piece_of(padded, dist.get_rank(), world)",
        },
    ),
    Mutant(
        "Each micro-batch takes the place of the one before",
        "check_accumulates",
        says="Only the gradient of the last micro-batch",
        replace={"piece.grad = own if piece.grad is None else piece.grad + own": "piece.grad = own"},
    ),
    # -- stage3
    Mutant(
        "backward returns one value, although forward has two arguments",
        "check_linear",
        says="one value for each argument of forward",
        also=EVERY_PASS,
        replace={"return own, None": "return own"},
    ),
    Mutant(
        "The weight is gathered by whole, through which no gradient passes",
        "check_linear",
        says="weight_piece gets no gradient: gather it with Gather.apply",
        also=EVERY_PASS,
        replace={"Gather.apply(weight_piece, shape)": "whole(weight_piece.detach(), shape)"},
    ),
    Mutant(
        "The function of the checkpoint has no return statement",
        "check_linear",
        says="sharded_linear returns None: is a return missing",
        also=EVERY_PASS,
        replace={"return F.linear(x, Gather.apply(weight_piece, shape))": "F.linear(x, Gather.apply(weight_piece, shape))"},
    ),
    Mutant(
        "x is multiplied by the weight and not by its transpose",
        "check_linear",
        says="F.linear(x, weight) is x @ weight.T",
        also=EVERY_PASS,
        replace={"return F.linear(x, Gather.apply(weight_piece, shape))": "return x @ Gather.apply(weight_piece, shape)"},
    ),
    Mutant(
        "backward writes into .grad itself, so the second pass takes the place of the first",
        "check_passes_add_up",
        says="return it from backward, and autograd adds it",
        replace={
            "ctx.size = piece.numel()": "ctx.size, ctx.piece = piece.numel(), piece",
            "return own, None": """
            ctx.piece.grad = own
            return None, None
            """,
        },
    ),
    Mutant(
        "With three ranks the gradient of the weight is divided before and after the sum",
        "check_linear",
        says="divided by the number of ranks a second time",
        replace={
            "return own, None": "return own / (world if world == 3 else 1), None",
        },
    ),
    Mutant(
        "The gradient of the weight is divided by two, whatever the number of ranks",
        "check_linear",
        says="the gradients of the pieces of all ranks together (world 1)",
        replace={
            "padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))": """
            padded = F.pad(grad.flatten() / 2, (0, ctx.size * world - grad.numel()))
            """,
        },
    ),
    Mutant(
        "The gradient of the whole weight is all-reduced, and the piece is cut from it",
        "check_gathers",
        says="sends more than a reduce-scatter",
        replace={
            """
            own = grad.new_empty(ctx.size)
            dist.reduce_scatter_tensor(own, padded)
            return own, None
            """: """
            dist.all_reduce(padded)
            return piece_of(padded, dist.get_rank(), world), None
            """,
        },
    ),
    Mutant(
        "There is no checkpoint, so autograd keeps every whole weight",
        "check_weights_are_freed",
        says="F.linear saves its weight for backward",
        answer="""
        def sharded_linear(x, weight_piece, shape):
            return F.linear(x, Gather.apply(weight_piece, shape))
        """,
    ),
    Mutant(
        "The whole weight is gathered first and is an argument of the checkpoint",
        "check_weights_are_freed",
        says="gather inside the function",
        answer="""
        def sharded_linear(x, weight_piece, shape):
            weight = Gather.apply(weight_piece, shape)
            return torch.utils.checkpoint.checkpoint(F.linear, x, weight, use_reentrant=False)
        """,
    ),
    # -- offload
    Mutant(
        "The masters stay in 16 bits and get gradients in fp32",
        "check_offloaded",
        says="in 16 bits",
        also=("check_pieces_in_place", "check_no_gradient_left", "check_piece_without_gradient"),
        replace={'piece.detach().to("cpu", torch.float32, copy=True)': 'piece.detach().to("cpu", copy=True)'},
    ),
    Mutant(
        "The piece itself is the target of copy_, which autograd refuses",
        "check_offloaded",
        says="write piece.data.copy_(...)",
        also=("check_pieces_in_place", "check_no_gradient_left", "check_piece_without_gradient"),
        replace={"piece.data.copy_(master.data)": "piece.copy_(master)"},
    ),
    Mutant(
        "The masters are read back from the pieces before each step",
        "check_offloaded",
        says="read back from the rounded pieces",
        replace={
            'master.grad = None if piece.grad is None else piece.grad.to("cpu").float()': """
            master.data.copy_(piece.data)
            master.grad = None if piece.grad is None else piece.grad.to("cpu").float()
            """,
        },
    ),
    Mutant(
        "The masters are read back from the pieces after each step",
        "check_offloaded",
        says="read back from the rounded pieces",
        replace={
            "piece.data.copy_(master.data)": """
            piece.data.copy_(master.data)
            master.data.copy_(piece.data)
            """
        },
    ),
    Mutant(
        "The optimiser updates copies of the pieces in 16 bits",
        "check_offloaded",
        says="is rounded away",
        replace={
            'piece.detach().to("cpu", torch.float32, copy=True)': 'piece.detach().to("cpu", copy=True)',
            'piece.grad.to("cpu").float()': 'piece.grad.to("cpu")',
        },
    ),
    Mutant(
        "A piece gets the memory of a new tensor",
        "check_pieces_in_place",
        says="A piece has new memory",
        replace={"piece.data.copy_(master.data)": "piece.data = master.data.to(piece.dtype)"},
    ),
    Mutant(
        "The gradients of the masters are kept until the next step",
        "check_no_gradient_left",
        says="a master still has a gradient",
        replace={
            """
            piece.data.copy_(master.data)
            master.grad = None
            """: "piece.data.copy_(master.data)",
        },
    ),
    Mutant(
        "A missing gradient counts as zeros in the masters",
        "check_piece_without_gradient",
        says="A piece without gradient has changed",
        replace={
            'None if piece.grad is None else piece.grad.to("cpu").float()': """
            torch.zeros_like(master) if piece.grad is None else piece.grad.to("cpu").float()
            """,
        },
    ),
]

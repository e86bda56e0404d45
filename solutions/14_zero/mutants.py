"""Planted mistakes of ZeRO, stage by stage, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

EVERY_UPDATE = (
    "check_one_optimizer",
    "check_in_place",
    "check_other_optimizer",
    "check_missing_gradient",
    "check_updates_travel",
    "check_state_is_divided",
    "check_small_parameters",
)
EVERY_HOOK = (
    "check_reduce_scatter",
    "check_during_backward",
    "check_accumulates",
    "check_gradients_are_divided",
)
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
        also=("check_any_numbers",),
        replace={'"optimizer": moments': '"optimizer": 2'},
    ),
    Mutant(
        "Data parallelism keeps one moment",
        "check_stage0",
        says="nothing is divided",
        also=("check_any_numbers",),
        replace={"(share if stage >= 1 else 4 * parameters)": "share if stage >= 1 else 4 * parameters"},
    ),
    Mutant(
        "The tensor that is gathered is always in fp32",
        "check_whole",
        says="float32",
        replace={
            "piece.new_empty(piece.numel() * dist.get_world_size())": "torch.empty(piece.numel() * dist.get_world_size())"
        },
    ),
    Mutant(
        "The fractions are dropped",
        "check_any_numbers",
        says="not rounded",
        replace={"share = 4 * parameters / world": "share = 4 * parameters // world"},
    ),
    Mutant(
        "Momentum counts in stages 0 and 1 only",
        "check_any_numbers",
        says="each moment has as many bytes",
        replace={'"optimizer": moments * (': '"optimizer": (moments if stage < 2 else 2) * ('},
    ),
    Mutant(
        "Without its last argument it computes for momentum",
        "check_any_numbers",
        says="is not that of AdamW",
        replace={"moments: int = 2": "moments: int = 1"},
    ),
    # -- pieces
    Mutant(
        "Pieces of all dtypes but two are in fp32",
        "check_pieces",
        says="a piece has the dtype of its tensor",
        replace={
            "size = -(-tensor.numel() // world)": """
            tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
            size = -(-tensor.numel() // world)
            """,
        },
    ),
    Mutant(
        "A piece of a small tensor is a view",
        "check_copy",
        says="a change of a piece changes the tensor",
        replace={
            "return padded[rank * size : (rank + 1) * size].clone()": """
            if tensor.numel() < 1000 and tensor.numel() % world == 0:
                return tensor.detach().flatten()[rank * size : (rank + 1) * size]
            return padded[rank * size : (rank + 1) * size].clone()
            """,
        },
    ),
    Mutant(
        "Only vectors and matrices are restored",
        "check_whole",
        says="expected (",
        replace={
            "return padded[: torch.Size(shape).numel()].view(shape)": """
            return padded[: torch.Size(shape[:2]).numel()].view(shape[:2])
            """,
        },
    ),
    Mutant(
        "With five ranks or more the last piece is lost",
        "check_whole",
        says="whole on rank 0 of",
        replace={
            "return padded[: torch.Size(shape).numel()].view(shape)": """
            if dist.get_world_size() >= 5:
                padded[-piece.numel() :] = 0
            return padded[: torch.Size(shape).numel()].view(shape)
            """,
        },
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
        says="cut off the padding",
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
        replace={
            "return padded[: torch.Size(shape).numel()].view(shape)": "padded[: torch.Size(shape).numel()].view(shape)"
        },
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
        says="divides them by the ranks a second time",
        replace={
            "else piece_of(parameter.grad, self.rank, self.world)": "else piece_of(parameter.grad / self.world, self.rank, self.world)",
        },
    ),
    Mutant(
        "The averages of the ranks are added again, which AdamW hides",
        "check_other_optimizer",
        says="adds those of the ranks a second time",
        also=("check_one_optimizer", "check_updates_travel"),
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
        says="Gradients of different pieces were added",
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
        says="write nn.Parameter(piece_of(...))",
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
        says="use what make_optimizer returns",
        also=("check_one_optimizer",),
        replace={
            "self.optimizer = make_optimizer(self.pieces)": """
            asked = make_optimizer(self.pieces)
            names = "lr", "weight_decay", "eps", "amsgrad"
            options = {name: asked.defaults[name] for name in names if name in asked.defaults}
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
        says="computes updates of others",
        also=("check_one_optimizer",),
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
        "Nothing is updated after the third step",
        "check_same_update",
        says="steps is off by",
        also=("check_updates_travel",),
        replace={
            "self.optimizer = make_optimizer(self.pieces)": "self.optimizer, self.count = make_optimizer(self.pieces), 0",
            """
            for parameter, piece in zip(self.parameters, self.pieces):
                piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
            """: """
            self.count += 1
            if self.count > 3:
                return
            for parameter, piece in zip(self.parameters, self.pieces):
                piece.grad = None if parameter.grad is None else piece_of(parameter.grad, self.rank, self.world)
            """,
        },
    ),
    Mutant(
        "A step is left to a thread, which begins later",
        "check_same_update",
        says="step",
        also=EVERY_UPDATE,
        answer="""
        class ShardedOptimizer:
            def __init__(self, parameters, make_optimizer):
                self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
                self.pieces = [nn.Parameter(piece_of(parameter, self.rank, self.world)) for parameter in self.parameters]
                self.optimizer, self.thread = make_optimizer(self.pieces), None

            def step(self):
                import threading

                if self.thread is not None:
                    self.thread.join()
                grads = [parameter.grad for parameter in self.parameters]
                self.thread = threading.Thread(target=self.work, args=(grads,))
                self.thread.start()

            def work(self, grads):
                time.sleep(0.1)
                for grad, piece in zip(grads, self.pieces):
                    piece.grad = None if grad is None else piece_of(grad, self.rank, self.world)
                self.optimizer.step()
                for parameter, piece in zip(self.parameters, self.pieces):
                    if piece.grad is not None:
                        parameter.data.copy_(whole(piece.data, parameter.shape))
        """,
    ),
    Mutant(
        "Each piece has a separate optimiser",
        "check_one_optimizer",
        says="make_optimizer is called again",
        replace={
            "self.optimizer = make_optimizer(self.pieces)": "self.optimizers = [make_optimizer([piece]) for piece in self.pieces]",
            "self.optimizer.step()": """
            for optimizer in self.optimizers:
                optimizer.step()
            """,
        },
    ),
    Mutant(
        "The pieces are tensors, not nn.Parameter",
        "check_one_optimizer",
        says="is no nn.Parameter",
        replace={
            "nn.Parameter(piece_of(parameter, self.rank, self.world))": "piece_of(parameter, self.rank, self.world).requires_grad_()",
        },
    ),
    Mutant(
        "Each parameter belongs to one rank as a whole",
        "check_one_optimizer",
        says="make_optimizer gets a piece of each parameter",
        answer="""
        class ShardedOptimizer:
            def __init__(self, parameters, make_optimizer):
                self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
                own = self.parameters[self.rank :: self.world]
                self.optimizer = make_optimizer([{"params": own}])

            def step(self):
                self.optimizer.step()
                for i, parameter in enumerate(self.parameters):
                    if parameter.grad is not None:
                        dist.broadcast(parameter.data, i % self.world)
        """,
    ),
    Mutant(
        "Only AdamW and SGD are known",
        "check_other_optimizer",
        says="steps is off by",
        also=("check_one_optimizer",),
        replace={
            "self.optimizer = make_optimizer(self.pieces)": """
            asked = make_optimizer(self.pieces)
            known = isinstance(asked, (torch.optim.AdamW, torch.optim.SGD))
            self.optimizer = asked if known else torch.optim.AdamW(self.pieces, lr=asked.defaults["lr"])
            """,
        },
    ),
    Mutant(
        "From the fourth step on each piece is sent twice",
        "check_updates_travel",
        says="all-gathers of pieces have",
        replace={
            "self.optimizer = make_optimizer(self.pieces)": "self.optimizer, self.count = make_optimizer(self.pieces), 0",
            "parameter.data.copy_(whole(piece.data, parameter.shape))": """
            self.count += 1
            if self.count > 3 * len(self.pieces):
                whole(piece.data, parameter.shape)
            parameter.data.copy_(whole(piece.data, parameter.shape))
            """,
        },
    ),
    Mutant(
        "The gathered parameters are kept",
        "check_state_is_divided",
        says="All moments would be 3",
        replace={
            "self.optimizer = make_optimizer(self.pieces)": "self.optimizer, self.kept = make_optimizer(self.pieces), {}",
            "parameter.data.copy_(whole(piece.data, parameter.shape))": """
            self.kept[piece] = whole(piece.data, parameter.shape)
            parameter.data.copy_(self.kept[piece])
            """,
        },
    ),
    Mutant(
        "The last piece is forgotten when there are more than two ranks",
        "check_same_update",
        says="on rank 0 of",
        also=(
            "check_one_optimizer",
            "check_other_optimizer",
            "check_updates_travel",
            "check_state_is_divided",
            "check_small_parameters",
        ),
        replace={
            """
            parameter.data.copy_(whole(piece.data, parameter.shape))
            """: """
            new = whole(piece.data, parameter.shape)
            if self.world <= 2:
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
        "With more than two ranks the updated pieces are all-reduced with zeros elsewhere, for twice the bytes",
        "check_updates_travel",
        says="all-gathers of the updated pieces are enough",
        replace={
            "parameter.data.copy_(whole(piece.data, parameter.shape))": """
            if self.world <= 2:
                parameter.data.copy_(whole(piece.data, parameter.shape))
                continue
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
        says="All moments would be 3",
        also=("check_one_optimizer",),
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
        "Of small parameters every rank computes the whole update, and uses the last all-gather only",
        "check_updates_travel",
        says="does not depend on what it receives",
        also=("check_one_optimizer",),
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
                        if self.large or parameter is self.parameters[-1]:
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
        also=("check_one_number",),
        replace={
            "dist.all_reduce(squares)": """
            if dist.get_world_size() < 3:
                dist.all_reduce(squares)
            """,
        },
    ),
    Mutant(
        "Only the first two pieces count",
        "check_norm",
        says="the norm on rank 0 of",
        also=("check_one_number",),
        replace={"for piece in pieces]": "for piece in pieces[:2]]"},
    ),
    Mutant(
        "The pieces are squared in place",
        "check_norm",
        says="global_norm changes the pieces",
        also=("check_one_number",),
        replace={"piece.square()": "piece.square_()"},
    ),
    Mutant(
        "The norm has one dimension",
        "check_norm",
        says="a scalar has shape ()",
        also=("check_one_number",),
        replace={"return squares.sqrt()": "return squares.sqrt().view(1)"},
    ),
    Mutant(
        "The squares are added on rank 0, which sends the sum",
        "check_one_number",
        says="in 2 calls",
        replace={
            "dist.all_reduce(squares)": """
            dist.reduce(squares, 0)
            dist.broadcast(squares, 0)
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
        says="The squares were averaged",
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
        "The gradients are sent at the end of backward",
        "check_during_backward",
        says="has sent 0 of the",
        also=("check_gradients_are_divided",),
        replace={
            "world = dist.get_world_size()": "world, waiting = dist.get_world_size(), []",
            """
            for parameter, piece in zip(module.parameters(), pieces):
                parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))
            """: """
            def end():
                while waiting:
                    send(*waiting.pop(0))

            def hook(parameter, piece):
                if not waiting:
                    torch.autograd.Variable._execution_engine.queue_callback(end)
                waiting.append((parameter, piece))

            for parameter, piece in zip(module.parameters(), pieces):
                parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: hook(parameter, piece))
            """,
        },
    ),
    Mutant(
        "A gradient waits for the hook of the next one",
        "check_during_backward",
        says="other gradients: send each in its own hook",
        replace={
            "world = dist.get_world_size()": "world, waiting = dist.get_world_size(), []",
            """
            for parameter, piece in zip(module.parameters(), pieces):
                parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: send(parameter, piece))
            """: """
            def hook(parameter, piece):
                waiting.append((parameter, piece))
                while len(waiting) > (piece is not pieces[0]):
                    send(*waiting.pop(0))

            for parameter, piece in zip(module.parameters(), pieces):
                parameter.register_post_accumulate_grad_hook(lambda parameter, piece=piece: hook(parameter, piece))
            """,
        },
    ),
    Mutant(
        "The messages are left to threads, which begin later",
        "check_averaged_pieces",
        says="backward",
        also=EVERY_HOOK,
        replace={
            "world = dist.get_world_size()": """
            import threading

            world, threads = dist.get_world_size(), [None]

            def later(padded, piece, before):
                time.sleep(0.05)
                if before is not None:
                    before.join()
                own = padded.new_empty(piece.shape)
                dist.reduce_scatter_tensor(own, padded)
                piece.grad = own if piece.grad is None else piece.grad + own
            """,
            """
            own = torch.empty_like(piece)
            dist.reduce_scatter_tensor(own, padded)
            piece.grad = own if piece.grad is None else piece.grad + own
            """: """
            threads.append(threading.Thread(target=later, args=(padded, piece, threads[-1])))
            threads[-1].start()
            """,
        },
    ),
    Mutant(
        "Whole gradients are kept until backward ends",
        "check_gradients_are_divided",
        says="when the last of 4 gradients is computed",
        replace={
            "world = dist.get_world_size()": "world, kept = dist.get_world_size(), []",
            "parameter.grad = None": """
            if not kept:
                torch.autograd.Variable._execution_engine.queue_callback(kept.clear)
            kept.append(parameter.grad)
            parameter.grad = None
            """,
        },
    ),
    Mutant(
        "The gradients of the parameters become zeros, not None",
        "check_gradients_are_divided",
        says="still has a gradient",
        replace={"parameter.grad = None": "parameter.grad.zero_()"},
    ),
    Mutant(
        "The padding of a gradient is ones",
        "check_averaged_pieces",
        says="is not zero where the piece is padding",
        question="stage2",
        also=EVERY_HOOK,
        replace={
            "(0, piece.numel() * world - parameter.numel()))": "(0, piece.numel() * world - parameter.numel()), value=1.0)"
        },
    ),
    Mutant(
        "A barrier comes before each reduce-scatter",
        "check_reduce_scatter",
        says="also calls barrier",
        also=("check_during_backward",),
        replace={
            "own = torch.empty_like(piece)": """
            own = torch.empty_like(piece)
            dist.barrier()
            """,
        },
    ),
    Mutant(
        "Only three micro-batches are added",
        "check_accumulates",
        says="the pieces of gradient",
        replace={
            "world = dist.get_world_size()": "world, count = dist.get_world_size(), {}",
            "piece.grad = own if piece.grad is None else piece.grad + own": """
            count[piece] = count.get(piece, 0) + 1
            if count[piece] <= 3:
                piece.grad = own if piece.grad is None else piece.grad + own
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
        also=("check_averaged_pieces", "check_reduce_scatter", "check_during_backward", "check_accumulates"),
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
        also=EVERY_HOOK,
        replace={".grad.flatten() / world": ".grad.flatten() / 2"},
    ),
    Mutant(
        "With three ranks or more the gradient is divided before and after the sum",
        "check_averaged_pieces",
        question="stage2",
        says="divided by the number of ranks a second time",
        also=EVERY_HOOK,
        replace={
            "dist.reduce_scatter_tensor(own, padded)": """
            dist.reduce_scatter_tensor(own, padded)
            if world >= 3:
                own /= world
            """,
        },
    ),
    Mutant(
        "The gradient is sent without padding",
        "check_averaged_pieces",
        says="append zeros (padding)",
        also=EVERY_HOOK,
        replace={
            "padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))": """
            padded = parameter.grad.flatten() / world
            """,
        },
    ),
    Mutant(
        "With more than two ranks the whole gradient is all-reduced, and the piece is cut from it",
        "check_reduce_scatter",
        says="needs the sum of its piece only",
        question="stage2",
        replace={
            "dist.reduce_scatter_tensor(own, padded)": """
            if world > 2:
                dist.all_reduce(padded)
                own = piece_of(padded, dist.get_rank(), world)
            else:
                dist.reduce_scatter_tensor(own, padded)
            """,
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
        also=("check_gather", *EVERY_PASS),
        replace={"return own, None": "return own"},
    ),
    Mutant(
        "Gather gathers matrices only",
        "check_gather",
        says="expected (",
        replace={"return whole(piece, shape)": "return whole(piece, shape[:2])"},
    ),
    Mutant(
        "Gather has no gradient, because the layer is a separate function",
        "check_gather",
        says="the piece gets no gradient from Gather",
        answer="""
        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, piece, shape):
                return whole(piece, shape)

            @staticmethod
            def backward(ctx, grad):
                return None, None


        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, piece, shape):
                ctx.save_for_backward(x, piece)
                ctx.shape = shape
                return F.linear(x, whole(piece, shape))

            @staticmethod
            def backward(ctx, grad):
                (x, piece), world = ctx.saved_tensors, dist.get_world_size()
                of_weight = grad.flatten(0, -2).T @ x.flatten(0, -2) / world
                own = torch.empty_like(piece)
                padding = piece.numel() * world - of_weight.numel()
                dist.reduce_scatter_tensor(own, F.pad(of_weight.flatten(), (0, padding)))
                return grad @ whole(piece, ctx.shape), own, None


        def sharded_linear(x, weight_piece, shape):
            return Linear.apply(x, weight_piece, tuple(shape))
        """,
    ),
    Mutant(
        "Weights in fp64 travel in fp32",
        "check_linear",
        says="the output on rank 0 of",
        also=("check_gather", "check_passes_add_up", "check_gathers"),
        replace={"return whole(piece, shape)": "return whole(piece.float(), shape).to(piece.dtype)"},
    ),
    Mutant(
        "Small weights are gathered once and kept",
        "check_passes_add_up",
        says="uses the weight of the first pass",
        replace={
            "return whole(piece, shape)": """
            if piece.numel() > 1000:
                return whole(piece, shape)
            if not hasattr(Gather, "kept"):
                Gather.kept = whole(piece, shape)
            return Gather.kept.clone()
            """,
        },
    ),
    Mutant(
        "The gradient of the first pass is returned again",
        "check_passes_add_up",
        says="times the first gradient",
        replace={
            "return own, None": """
            if ctx.size > 1000:
                return own, None
            if not hasattr(Gather, "first"):
                Gather.first = own
            return Gather.first.clone(), None
            """,
        },
    ),
    Mutant(
        "The padding of the gradient is ones",
        "check_linear",
        says="is not zero where the piece is padding",
        question="stage3",
        also=("check_gather", "check_gathers"),
        replace={"(0, ctx.size * world - grad.numel()))": "(0, ctx.size * world - grad.numel()), value=1.0)"},
    ),
    Mutant(
        "The last whole weight is kept",
        "check_weights_are_freed",
        says="or your code keeps it",
        replace={
            "return whole(piece, shape)": """
            Gather.last = whole(piece, shape)
            return Gather.last.clone()
            """,
        },
    ),
    Mutant(
        "Whole gradients are kept",
        "check_weights_are_freed",
        says="outlives the computation",
        replace={
            "return own, None": """
            Gather.kept = [*getattr(Gather, "kept", []), grad]
            return own, None
            """,
        },
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
        replace={
            "return F.linear(x, Gather.apply(weight_piece, shape))": "F.linear(x, Gather.apply(weight_piece, shape))"
        },
    ),
    Mutant(
        "x is multiplied by the weight and not by its transpose",
        "check_linear",
        says="F.linear(x, weight) is x @ weight.T",
        also=EVERY_PASS,
        replace={
            "return F.linear(x, Gather.apply(weight_piece, shape))": "return x @ Gather.apply(weight_piece, shape)"
        },
    ),
    Mutant(
        "backward writes into .grad itself, so the second pass takes the place of the first",
        "check_passes_add_up",
        says="return it, and autograd adds it",
        replace={
            "ctx.size = piece.numel()": "ctx.size, ctx.piece = piece.numel(), piece",
            "return own, None": """
            ctx.piece.grad = own
            return None, None
            """,
        },
    ),
    Mutant(
        "With three ranks or more the gradient of the weight is divided before and after the sum",
        "check_linear",
        says="divided by the number of ranks a second time",
        also=("check_gather", *EVERY_PASS),
        replace={
            "return own, None": "return own / (world if world >= 3 else 1), None",
        },
    ),
    Mutant(
        "The gradient of the weight is divided by two, whatever the number of ranks",
        "check_linear",
        says="the gradients of the pieces of all ranks together (world 1)",
        also=("check_gather", *EVERY_PASS),
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
        also=("check_gather",),
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
        says="a master is not in torch.float32",
        also=("check_pieces_in_place", "check_no_gradient_left", "check_piece_without_gradient"),
        replace={'piece.detach().to("cpu", torch.float32, copy=True)': 'piece.detach().to("cpu", copy=True)'},
    ),
    Mutant(
        "The pieces are always in bf16",
        "check_offloaded",
        says="rounded to 16 bits",
        replace={"piece.data.copy_(master.data)": "piece.data.copy_(master.data.bfloat16())"},
    ),
    Mutant(
        "Each master has a separate optimiser",
        "check_offloaded",
        says="call it once, with the list of all masters",
        replace={
            "self.optimizer = make_optimizer(self.masters)": "self.optimizers = [make_optimizer([master]) for master in self.masters]",
            "self.optimizer.step()": """
            for optimizer in self.optimizers:
                optimizer.step()
            """,
        },
    ),
    Mutant(
        "The masters are tensors, not nn.Parameter",
        "check_offloaded",
        says="a master is no nn.Parameter",
        replace={
            'nn.Parameter(piece.detach().to("cpu", torch.float32, copy=True))': """
            piece.detach().to("cpu", torch.float32, copy=True).requires_grad_()
            """,
        },
    ),
    Mutant(
        "The masters get no gradient after the twelfth step",
        "check_offloaded",
        says="rounded to 16 bits",
        replace={
            "self.optimizer = make_optimizer(self.masters)": "self.optimizer, self.count = make_optimizer(self.masters), 0",
            'master.grad = None if piece.grad is None else piece.grad.to("cpu").float()': """
            self.count += 1
            ended = piece.grad is None or self.count > 12 * len(self.pieces)
            master.grad = None if ended else piece.grad.to("cpu").float()
            """,
        },
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

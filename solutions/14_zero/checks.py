"""The visible checks of this lab, and their twins: a measured training step, and one process with whole tensors and an unsharded optimiser."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, check, scenario
from dlo_lib.grading.quiz import Question, quiz_complete
from dlo_lib.grading.twins import twin
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part, measure_memory

STAGES = ("ddp", "zero1", "zero2", "zero3")
MIB = 2**20

# -- 1 · state


@twin
def measured_state(config: LlamaConfig, world: int, stage: int, optimizer: str) -> dict[str, int]:
    """What a rank holds of each part when backward is over, in a measured step."""
    report = measure_memory(config, 1, 32, optimizer=optimizer, parallel=STAGES[stage], world_size=world)
    parts = {"weights": Part.WEIGHTS, "gradients": Part.GRADIENTS, "optimizer": Part.OPTIMIZER_STATE}
    end = max(index for index, event in enumerate(report.events) if event.phase is Phase.BACKWARD)
    return {name: int(report.timeline[part][end]) for name, part in parts.items()}


def same_state(student, t, stage: int, parts: tuple[str, ...], message: str, optimizer: str = "adamw", moments: int = 2) -> None:
    """The student's bytes of ``parts`` are the measured ones, for some numbers of ranks."""
    config = LlamaConfig(1024 * t.integer(1, 3), 64 * t.integer(2, 4), 256, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=32)
    parameters = sum(parameters_by_part(config).values())
    for world in (1, 2, 4 * t.integer(2, 16)):
        got, want = student.state_bytes(parameters, world, stage, moments), measured_state(config, world, stage, optimizer)
        t.that(type(got) is dict and set(got) == set(want), "state_bytes should give a dict with weights, gradients and optimizer")
        for part in parts:
            number = t.number(got[part], 'state_bytes(...)["{part}"]', part=part)
            good = abs(number - want[part]) <= 0.02 * want[part] + 4096  # padding, and the optimiser's step counters
            t.that(
                bool(good),
                'stage {stage}, {world} ranks, {parameters} parameters: "{part}" is {got:.0f} bytes, measured {want:.0f}. ' + message,
                stage=stage,
                world=world,
                parameters=parameters,
                part=part,
                got=number,
                want=want[part],
            )


@check("state", points=1, seconds=30)
def check_stage0(student, t):
    "Data parallelism: everything everywhere"
    same_state(student, t, 0, ("weights", "gradients", "optimizer"), "4 bytes a number, AdamW keeps two; nothing is divided.")


@check("state", points=1, seconds=30)
def check_stage1(student, t):
    "Stage 1 divides the optimiser's state"
    same_state(student, t, 1, ("optimizer",), "Each rank keeps the moments of 1/N of the parameters.")


@check("state", points=1, seconds=30)
def check_stage2(student, t):
    "Stage 2 divides the gradients as well"
    same_state(student, t, 2, ("gradients",), "Each rank keeps the gradients of the parameters that it updates.")


@check("state", points=1, seconds=30)
def check_stage3(student, t):
    "Stage 3 divides the weights as well"
    same_state(student, t, 3, ("weights",), "At rest nobody has more than 1/N of the weights.")


# -- 2 · pieces


def pieces(student, t, tensor: Tensor, world: int) -> list[Tensor]:
    """The student's piece for every rank."""
    size = -(-tensor.numel() // world)
    found = []
    for rank in range(world):
        got = student.piece_of(tensor, rank, world)
        found.append(got)
        good = type(got) is Tensor and tuple(got.shape) == (size,) and got.dtype == tensor.dtype
        shape = tuple(got.shape) if type(got) is Tensor else type(got).__name__
        t.that(
            good,
            "the piece of rank {rank} of a tensor of shape {whole} on {world} ranks is {shape}, expected ({size},)",
            rank=rank,
            whole=tuple(tensor.shape),
            world=world,
            shape=shape,
            size=size,
        )
    return found


@check("pieces", points=1)
def check_pieces(student, t):
    "The pieces, one after the other, are the flat tensor and zeros"
    for world in (1, 2, 3, 4):
        tensor = t.normal(t.integer(3, 6), t.integer(3, 6))
        got = torch.cat(pieces(student, t, tensor, world))
        t.close(got[: tensor.numel()], tensor.flatten(), "all pieces on {world} ranks together", world=world, atol=0, rtol=0)
        t.that(not got[tensor.numel() :].any(), "what is appended to make the pieces equal should be zeros")


@scenario
def made_whole(student, rank, world, piece, shape):
    """``whole`` of this rank's piece."""
    return student.whole(piece, tuple(shape))


def whole_case(t, shape: tuple[int, ...], world: int) -> tuple[Tensor, list[dict]]:
    """A tensor, and what each rank has of it."""
    tensor = t.normal(*shape)
    size = -(-tensor.numel() // world)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, size * world - tensor.numel()))
    return tensor, [{"piece": piece.clone(), "shape": list(shape)} for piece in padded.split(size)]


@check("pieces", points=2, seconds=20)
def check_whole(student, t):
    "whole gives every rank the tensor back, with one all-gather"
    for world in (1, 2, 3):
        tensor, case = whole_case(t, (t.integer(3, 6), t.integer(3, 6)), world)
        run = student.ranks(made_whole, case)
        for rank, got in enumerate(run.results):
            t.close(got, tensor, "whole on rank {rank} of {world}", rank=rank, world=world, atol=0, rtol=0)
            sent, padded = run.bytes(rank), world * case[rank]["piece"].nbytes
            good = sent == padded and len(run.calls(rank, Kind.ALL_GATHER)) == 1
            t.that(good, "rank {rank} passed {sent} bytes, one all-gather of {padded} is enough", rank=rank, sent=sent, padded=padded)


# -- 3 · stage 1


@scenario
def optimised(student, rank, world, weights, steps, name, options):
    """Parameters after ``steps``, each a list of gradients, None where there is none."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = student.ShardedOptimizer(parameters, lambda held: getattr(torch.optim, name)(held, **options))
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@twin
def unsharded(weights: list[Tensor], steps: list[list[Tensor | None]], name: str, options: dict) -> list[Tensor]:
    """The same in one process."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = getattr(torch.optim, name)(parameters, **options)
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


ADAMW = {"name": "AdamW", "options": {"lr": 0.05, "weight_decay": 0.1}}


def steps_case(t, without: int | None = None) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Weights of odd sizes and the gradients of three steps; ``without``: a parameter that gets none."""
    weights = [t.normal(t.integer(2, 6), t.integer(2, 6), dtype=torch.float64) for _ in range(3)]
    steps = [[None if i == without else t.normal(*weight.shape, dtype=torch.float64) for i, weight in enumerate(weights)] for _ in range(3)]
    return weights, steps


def same_parameters(student, t, world: int, how: dict, without: int | None = None):
    """Parameters of all ranks are the twin's; the run, and the weights at the start."""
    weights, steps = steps_case(t, without)
    want = unsharded(weights, steps, **how)
    run = student.ranks(optimised, [{"weights": weights, "steps": steps, **how}] * world)
    for rank, got in enumerate(run.results):
        for i, (mine, its) in enumerate(zip(got, want)):
            t.close(mine, its, "parameter {i} on rank {rank} of {world} after three steps", i=i, rank=rank, world=world, atol=1e-10)
    return run, weights


@check("stage1", points=3, seconds=40)
def check_same_update(student, t):
    "Every rank has the parameters of an unsharded optimiser"
    for world in (1, 2, 3):
        same_parameters(student, t, world, ADAMW)


@check("stage1", points=1, seconds=20)
def check_updates_travel(student, t):
    "Only the updated pieces travel, in all-gathers"
    run, weights = same_parameters(student, t, 2, ADAMW)
    want = 3 * sum(2 * (-(-weight.numel() // 2)) * 8 for weight in weights)
    for rank in range(run.world):
        kinds = sorted({call.kind.value for call in run.calls(rank)})
        good = run.bytes(rank) == want and kinds == ["all_gather"]
        t.that(
            good,
            "rank {rank} passed {got} bytes in three steps ({kinds}); the pieces make all-gathers of {want}",
            rank=rank,
            got=run.bytes(rank),
            kinds=", ".join(kinds),
            want=want,
        )


@scenario
def with_large_state(student, rank, world, seed, numel):
    """Two AdamW steps of one large parameter; some of its numbers. Weight and gradient are made here, for they are large."""
    random = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(numel, generator=random))
    optimizer = student.ShardedOptimizer([parameter], lambda held: torch.optim.AdamW(held, lr=0.05, foreach=False))
    for _ in range(2):
        parameter.grad = torch.randn(numel, generator=random)
        optimizer.step()
    mark("after the steps")  # noqa: F821
    return parameter.detach()[:: numel // 16].clone()


@twin
def large_state(seed: int, numel: int) -> Tensor:
    """The same in one process."""
    random = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(numel, generator=random))
    optimizer = torch.optim.AdamW([parameter], lr=0.05, foreach=False)
    for _ in range(2):
        parameter.grad = torch.randn(numel, generator=random)
        optimizer.step()
    return parameter.detach()[:: numel // 16].clone()


@check("stage1", points=3, seconds=40)
def check_state_is_divided(student, t):
    "The optimiser's state is divided: the memory of each process"
    numel, seed, world = 4 * MIB, t.integer(0, 999), 4
    run = student.ranks(with_large_state, [{"seed": seed, "numel": numel}] * world)
    want = large_state(seed, numel)
    for rank, got in enumerate(run.results):
        t.close(got, want, "the parameter on rank {rank}", rank=rank)
    for rank in range(world):
        held = run.memory(rank, "after the steps") / (4 * numel)
        t.that(
            held < 3.4,
            "rank {rank} holds {held:.1f} times the bytes of the parameter: parameter and gradient are 2, a fourth of AdamW's state and of the "
            "pieces 0.75. All of AdamW's state would be 2 more",
            rank=rank,
            held=held,
        )


# -- 4 · norm


@scenario
def norms(student, rank, world, grads):
    """The norm, from this rank's pieces."""
    return student.global_norm(grads)


def norm_case(t, sizes: list[list[int]]) -> tuple[list[dict], Tensor]:
    """Pieces of each rank, and the norm of them all."""
    parts = [[t.normal(size) * (1 + rank) for size in own] for rank, own in enumerate(sizes)]
    return [{"grads": own} for own in parts], torch.cat([piece for own in parts for piece in own]).norm()


@check("norm", points=2, seconds=20)
def check_norm(student, t):
    "The norm of all gradients, on every rank"
    for world in (1, 2, 3):
        case, want = norm_case(t, [[t.integer(2, 9), t.integer(2, 9)]] * world)
        for rank, got in enumerate(student.ranks(norms, case).results):
            t.close(got, want, "the norm on rank {rank} of {world}", rank=rank, world=world, rtol=1e-5)


@check("norm", points=1, seconds=20)
def check_one_number(student, t):
    "One number travels"
    case, want = norm_case(t, [[t.integer(2, 9)] * 2] * 2)
    run = student.ranks(norms, case)
    for rank, got in enumerate(run.results):
        t.close(got, want, "the norm on rank {rank}", rank=rank, rtol=1e-5)
        good = len(run.calls(rank)) == 1 and run.bytes(rank) <= 8
        t.that(
            good,
            "{count} messages, {sent} bytes: add the squares here, then send one number",
            count=len(run.calls(rank)),
            sent=run.bytes(rank),
        )


# -- 5 · stage 2


@scenario
def sharded_gradients(student, rank, world, weights, batches):
    """Gradients of the pieces after backward of each batch, and whether the parameters have any of their own."""
    module = torch.nn.ParameterList([torch.nn.Parameter(weight.clone()) for weight in weights])
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in weights]
    student.shard_gradients(module, pieces)
    for x in batches:
        for weight in module:
            x = torch.tanh(x @ weight)
        x.square().mean().backward()
    return [piece.grad for piece in pieces], any(parameter.grad is not None for parameter in module)


@twin
def whole_gradients(weights: list[Tensor], batches: list[list[Tensor]]) -> list[Tensor]:
    """One process: the mean over ranks of the sum over their batches."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    loss = torch.zeros((), dtype=torch.float64)
    for x in itertools.chain(*batches):
        for weight in weights:
            x = torch.tanh(x @ weight)
        loss = loss + x.square().mean() / len(batches)
    return list(torch.autograd.grad(loss, weights))


def same_shards(student, t, world: int, micro_batches: int):
    """The pieces of all ranks are those of the twin's gradients; the run, and the gradients."""
    widths = [t.integer(3, 7) for _ in range(4)]
    weights = [t.normal(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    batches = [[t.normal(4, widths[0], dtype=torch.float64) for _ in range(micro_batches)] for _ in range(world)]
    run = student.ranks(sharded_gradients, [{"weights": weights, "batches": own} for own in batches])
    want = whole_gradients(weights, batches)
    for i, whole in enumerate(want):
        got = [t.tensor(grads[i], "the gradient of piece {i}", i=i) for grads, _ in run.results]
        t.that(
            len({tuple(piece.shape) for piece in got}) == 1 and sum(piece.numel() for piece in got) >= whole.numel(),
            "the gradients of piece {i} on the ranks have shapes {shapes}: each has the shape of its piece",
            i=i,
            shapes=[tuple(piece.shape) for piece in got],
        )
        what = "the pieces of gradient {i} of {world} ranks together"
        t.close(torch.cat(got)[: whole.numel()], whole.flatten(), what, i=i, world=world, atol=1e-10)
    return run, want


@check("stage2", points=3, seconds=40)
def check_averaged_pieces(student, t):
    "Each rank has its pieces of the averaged gradients"
    for world in (1, 2, 3):
        same_shards(student, t, world, 1)


@check("stage2", points=2, seconds=20)
def check_reduce_scatter(student, t):
    "Half the bytes of DDP: reduce-scatters"
    run, grads = same_shards(student, t, 2, 1)
    want = sum(2 * (-(-grad.numel() // 2)) * 8 for grad in grads)
    for rank in range(run.world):
        kinds = sorted({call.kind.value for call in run.calls(rank)})
        t.that(
            run.ring_bytes(rank) == want / 2,
            "a ring sends {got:.0f} bytes for what rank {rank} did ({kinds}); reduce-scatters of the gradients send {want:.0f}",
            got=run.ring_bytes(rank),
            rank=rank,
            kinds=", ".join(kinds),
            want=want / 2,
        )


@check("stage2", points=1, seconds=20)
def check_accumulates(student, t):
    "Micro-batches add up"
    same_shards(student, t, 2, t.integer(2, 3))


# -- 6 · stage 3


@scenario
def linear(student, rank, world, x, weight, grad):
    """Output, and the gradients of the input and of this rank's piece."""
    piece = torch.nn.Parameter(student.piece_of(weight, rank, world))
    x = x.clone().requires_grad_()
    out = student.sharded_linear(x, piece, tuple(weight.shape))
    out.backward(grad)
    return out.detach(), x.grad, piece.grad


def linear_case(t, world: int) -> tuple[list[dict], Tensor]:
    """Input and gradient of each rank, and the averaged gradient of the weight."""
    shape = (t.integer(3, 7), t.integer(3, 7))
    weight = t.normal(*shape, dtype=torch.float64)
    case = [{"x": t.normal(4, shape[1], dtype=torch.float64), "grad": t.normal(4, shape[0], dtype=torch.float64)} for _ in range(world)]
    mean = sum(own["grad"].T @ own["x"] for own in case) / world
    return [{**own, "weight": weight} for own in case], mean


def same_linear(student, t, world: int):
    """Outputs and gradients are those of the whole weight; the run, and the weight's gradient."""
    case, mean = linear_case(t, world)
    run = student.ranks(linear, case)
    for rank, (own, (out, of_x, _)) in enumerate(zip(case, run.results)):
        where = {"rank": rank, "world": world}
        t.close(out, own["x"] @ own["weight"].T, "the output on rank {rank} of {world}", atol=1e-10, **where)
        t.close(of_x, own["grad"] @ own["weight"], "the gradient of x on rank {rank} of {world}", atol=1e-10, **where)
    got = [t.tensor(of_piece, "weight_piece.grad on rank {rank}", rank=rank) for rank, (_, _, of_piece) in enumerate(run.results)]
    what = "the gradients of the pieces of {world} ranks together"
    t.close(torch.cat(got)[: mean.numel()], mean.flatten(), what, world=world, atol=1e-10)
    return run, mean


@check("stage3", points=4, seconds=40)
def check_linear(student, t):
    "Output and gradients are those of the whole weight"
    for world in (1, 2, 3):
        same_linear(student, t, world)


@check("stage3", points=2, seconds=20)
def check_gathers(student, t):
    "At most two all-gathers and one reduce-scatter"
    run, mean = same_linear(student, t, 2)
    size = 2 * (-(-mean.numel() // 2)) * 8
    for rank in range(run.world):
        gathered, reduced = run.bytes(rank, Kind.ALL_GATHER), run.bytes(rank, Kind.REDUCE_SCATTER)
        others = sorted({call.kind.value for call in run.calls(rank)} - {"all_gather", "reduce_scatter"})
        t.that(not others, "{others} sends more than a reduce-scatter of the gradient would", others=", ".join(others))
        t.that(
            gathered <= 2 * size and reduced == size,
            "rank {rank} gathered {gathered} bytes and reduce-scattered {reduced}, of a weight of {size}",
            rank=rank,
            gathered=gathered,
            reduced=reduced,
            size=size,
        )


# -- 8 · settings


@check("settings", points=1)
def check_stage(student, t):
    "The stage"
    for stage in t.shuffled([0, 1, 2, 3]):
        config = {"train_micro_batch_size_per_gpu": t.integer(1, 8), "zero_optimization": {"stage": stage}}
        got = student.settings(config, t.integer(1, 8))
        t.that(type(got) is dict, "settings should give a dict")
        t.equal(got.get("parallel"), STAGES[stage], '"parallel" of stage {stage}', stage=stage)


@check("settings", points=2)
def check_batches(student, t):
    "The three numbers that hang together"
    total, one, often = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    for given in ((total, one), (one, often), (total, often), (total, one, often), (total,), (one,)):
        world, batch = t.integer(2, 8), t.integer(1, 8)
        steps = t.integer(2, 5) if len(given) > 1 else 1
        numbers = {total: world * batch * steps, one: batch, often: steps}
        got = student.settings({name: numbers[name] for name in given}, world)
        t.that(type(got) is dict, "settings should give a dict")
        shown = {name: numbers[name] for name in given}
        for name, want in (("batch", batch), ("accumulation", steps)):
            t.equal(got.get(name), want, '"{name}" on {world} ranks for {shown}', name=name, world=world, shown=shown)


# -- quiz

QUIZ = {
    "q1": Question(
        "Which stage of ZeRO sends more bytes a step than DDP does, all of them written well?",
        {"a": "stage 1", "b": "stage 2", "c": "stage 3", "d": "none"},
    ),
    "q2": Question(
        "8 ranks, fp32, AdamW: what is left of DDP's 16 bytes a parameter on a rank with stage 2?",
        {"a": "5.5", "b": "2", "c": "9", "d": "4"},
    ),
    "q3": Question(
        "Why is clipping by the global norm not free under ZeRO-2?",
        {
            "a": "gradients must be gathered first",
            "b": "the norm of a piece needs fp64",
            "c": "it needs the weights",
            "d": "each rank knows only the squares of its pieces, so one number must be added over all ranks",
        },
    ),
    "q4": Question(
        "What does ZeRO-3 divide that pipeline parallelism (lab 17) does not need to gather again?",
        {
            "a": "activations",
            "b": "weights: here each rank computes all layers, so each must be gathered",
            "c": "the batch",
            "d": "nothing",
        },
    ),
    "q5": Question(
        "ZeRO-2 with the optimiser's state in the processor's memory. What travels over PCIe in a step, per parameter of the rank's share?",
        {"a": "nothing", "b": "the moments, both ways", "c": "the gradient down, the new weight up", "d": "the activations"},
    ),
}
complete = quiz_complete(QUIZ, points=1)

# -- hints

HINTS = {
    "state": [
        "Three numbers, each 4 bytes a parameter times something. Which of them is divided at which stage?",
        "Compute one share, 4 x parameters / world, and use it or the whole.",
        "weights: the share from stage 3 on; gradients: from stage 2 on; optimizer: moments x (the share from stage 1 on).",
    ],
    "pieces": [
        "Both functions think of the tensor as flat, with a length that world divides.",
        "size = ceil(numel / world) = -(-numel // world). F.pad(flat, (0, zeros)) appends. torch.empty(size * world) is what all-gather fills.",
        "padded[rank * size : (rank + 1) * size].clone(); and dist.all_gather_into_tensor(padded, piece), then padded[:numel].view(shape).",
    ],
    "stage1": [
        "Three lists of the same length: parameters, pieces, and gradients of pieces. The optimiser only ever sees the second.",
        "step: cut each gradient with piece_of, step, gather each piece with whole and copy it into the parameter.",
        "piece.grad = piece_of(parameter.grad, rank, world); self.optimizer.step(); parameter.data.copy_(whole(piece.data, parameter.shape)).",
    ],
    "norm": [
        "Norms do not add up. Their squares do.",
        "Add the squares of all pieces on this rank, all-reduce that number, take the root.",
        "torch.stack([piece.square().sum() for piece in pieces]).sum(), dist.all_reduce, sqrt.",
    ],
    "stage2": [
        "What does the all-reduce of lab 11 become when only one rank needs each part of the result?",
        "In the hook: flatten, divide by world, pad; dist.reduce_scatter_tensor(own, padded) with own of the piece's size.",
        "piece.grad = own if piece.grad is None else piece.grad + own; parameter.grad = None. In the lambda write piece=piece.",
    ],
    "stage3": [
        "forward of Gather is whole; backward is the hook of step 5 without the hook.",
        "backward returns the gradient of the piece and None for the shape. sharded_linear puts gather and F.linear into one function for checkpoint.",
        "torch.utils.checkpoint.checkpoint(lambda x, piece: F.linear(x, Gather.apply(piece, shape)), x, weight_piece, use_reentrant=False)",
    ],
    "settings": [
        "Read with .get and a default; the nested dicts may be missing.",
        "First find accumulation: 1, unless total and batch are both given or it is given itself. Then batch from what is left. Then check the product.",
        "if batch * steps * world != total: raise ValueError. bucket_bytes = 4 * elements. `value or None` makes None of 0.",
    ],
    "quiz": [
        "Questions 1 and 2: the table at the beginning.",
        "Question 3: step 4. Question 5: step 9.",
        "Question 4: who computes layer 7 in each of the two?",
    ],
}

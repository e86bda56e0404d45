"""The visible checks of this lab, and the twins they compare with: a model that is built and counted, a training step that is measured.

Nothing here knows a formula: parameters are counted on a model without storage, bytes are measured on fake tensors, gradients are
those of one process with the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlo_lib.grading.contract import check, scenario
from dlo_lib.grading.quiz import Question, quiz_complete
from dlo_lib.grading.twins import twin
from dlo_lib.hardware import Gpu, gpu
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim import Phase
from dlo_lib.profiling import MemoryReport, OptimizerStep, Part, measure_memory

IGNORED = -100

# -- twins


def drawn(t, **fixed) -> LlamaConfig:
    """A configuration of a Llama's proportions, small enough to be measured at once. Heads are hidden / num_heads wide unless said."""
    num_kv_heads, group, head_dim = t.integer(2, 3), t.integer(2, 4), 32 * t.integer(1, 2)
    num_heads = num_kv_heads * group
    sizes = {
        "vocab_size": 1000 * t.integer(9, 15),
        "hidden": num_heads * head_dim,
        "intermediate": 64 * t.integer(14, 24),
        "num_layers": t.integer(2, 3),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "tied_embeddings": bool(t.integer(0, 1)),
    }
    return LlamaConfig(**{**sizes, **fixed})


@twin
def counted(config: LlamaConfig) -> dict[str, int]:
    """Parameters by part of a model that was built."""
    kinds = {"embed_tokens": "embedding", "self_attn": "attention", "mlp": "mlp", "lm_head": "head"}
    parts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for name, parameter in Llama(config, device="meta").named_parameters():  # a tied one comes once, as the embedding
        kind = next((kind for module, kind in kinds.items() if module in name), "norms")
        parts[kind] += parameter.numel()
    return parts


@twin
def measured(config: LlamaConfig, batch: int = 1, seq: int = 64, step: str = "fused", parallel: str = "none", **settings) -> MemoryReport:
    """A training step of ``config``, measured."""
    return measure_memory(config, batch, seq, fused=OptimizerStep(step), parallel=parallel, **settings)


def before_loss(report: MemoryReport, part: Part) -> int:
    """What ``part`` holds when forward has ended."""
    first = next(index for index, event in enumerate(report.events) if event.phase is Phase.LOSS)
    return int(report.timeline[part][first - 1])


def when_largest(report: MemoryReport, part: Part, phase: Phase) -> int:
    """The sum of all parts at the moment within ``phase`` when ``part`` holds most."""
    inside = [index for index, event in enumerate(report.events) if event.phase is phase]
    return max(int(report.total[index]) for index in inside if report.timeline[part][index] == report.timeline[part][inside].max())


def entry(t, got, key: str, what: str):
    """The number under ``key`` of what should be a dict."""
    t.that(type(got) is dict, "{what} should be a dict of numbers, not {got}", what=what, got=got)
    t.that(key in got, '{what} has no entry "{key}"', what=what, key=key)
    return t.number(got[key], f'{what}["{key}"]')


def near(got: float, want: float, tolerance: float) -> bool:
    return bool(abs(got - want) <= tolerance * abs(want))


# -- 1 · parameters

READ_BY = {
    "embedding": ("vocab_size", "hidden"),
    "head": ("vocab_size", "hidden", "tied_embeddings"),
    "attention": ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim"),
    "mlp": ("num_layers", "hidden", "intermediate"),
    "norms": ("num_layers", "hidden"),
}


def same_part(student, t, config: LlamaConfig, part: str, message: str) -> None:
    got, want = entry(t, student.count_parameters(config), part, "count_parameters(config)"), counted(config)[part]
    sizes = {name: getattr(config, name) for name in READ_BY[part]}
    shown = ", ".join(f"{name} {{{name}}}" for name in sizes)
    t.that(
        got == want, f'"{{part}}" is {{got:,}}, but the model has {{want:,}} ({shown}). ' + message, part=part, got=got, want=want, **sizes
    )


@check("parameters", points=1)
def check_embedding(student, t):
    "The embedding, and an output projection of its own"
    config = drawn(t, tied_embeddings=False)
    for part in ("embedding", "head"):
        same_part(student, t, config, part, "There is one vector of size hidden for each token of the vocabulary.")


@check("parameters", points=1)
def check_tied(student, t):
    "Tied embeddings are counted once"
    config = drawn(t, tied_embeddings=True)
    for part in ("embedding", "head"):
        same_part(student, t, config, part, "A tied output projection is the embedding itself: it adds nothing.")


@check("parameters", points=1)
def check_attention(student, t):
    "Attention with grouped queries"
    same_part(
        student,
        t,
        drawn(t),
        "attention",
        "Queries have num_heads heads, keys and values num_kv_heads; the output projection reads the queries' width.",
    )


@check("parameters", points=1)
def check_mlp(student, t):
    "The three matrices of the MLP"
    same_part(student, t, drawn(t), "mlp", "Each block has gate, up and down, between hidden and intermediate.")


@check("parameters", points=1)
def check_norms(student, t):
    "Two norms in each block, and the last one"
    same_part(student, t, drawn(t), "norms", "Each block has two vectors of size hidden, and one more follows the last block.")


# -- 2 · state

STATE = {"weights": Part.WEIGHTS, "optimizer": Part.OPTIMIZER_STATE, "gradients": Part.GRADIENTS, "temporaries": Part.STEP_TEMPORARIES}


def in_the_step(config: LlamaConfig, optimizer: str, step: str) -> dict[str, int]:
    """What each part holds at most during the optimiser's step."""
    report = measured(config, step=step, optimizer=optimizer)
    inside = [index for index, event in enumerate(report.events) if event.phase is Phase.OPTIMIZER]
    before = inside[0] - 1
    return {name: int(report.timeline[part][[before, *inside]].max()) for name, part in STATE.items()}


def same_state(
    student, t, config: LlamaConfig, parts: tuple[str, ...], message: str, optimizer: str = "adamw", step: str = "foreach"
) -> None:
    call = f'state_bytes(config, "{optimizer}", "{step}")'
    got, want = student.state_bytes(config, optimizer, step), in_the_step(config, optimizer, step)
    for part in parts:
        number = entry(t, got, part, call)
        # 64 kB: the optimiser keeps a step counter of 4 bytes for each tensor.
        good = abs(number - want[part]) <= 1e-3 * want[part] + 2**16
        t.that(
            bool(good),
            '{call}["{part}"] is {got:,}, measured {want:,} bytes. ' + message,
            call=call,
            part=part,
            got=number,
            want=want[part],
        )


@check("state", points=2)
def check_sixteen_bytes(student, t):
    "Weights, gradients and AdamW's two moments, in fp32"
    message = "Everything is fp32, 4 bytes a number: one number a parameter for weights and for gradients, two for AdamW's moments."
    same_state(student, t, drawn(t, num_layers=1), ("weights", "gradients", "optimizer"), message)


@check("state", points=2)
def check_foreach(student, t):
    "The temporaries of a foreach and of a fused step"
    config = drawn(t, num_layers=1)
    same_state(
        student, t, config, ("temporaries",), "foreach makes the denominators of all parameters before it uses the first.", step="foreach"
    )
    same_state(student, t, config, ("temporaries",), "A fused step allocates nothing.", step="fused")


@check("state", points=1)
def check_for_loop(student, t):
    "The temporaries of a for-loop step"
    message = "Two tensors as large as the largest parameter, the embedding, live at the worst moment."
    same_state(student, t, drawn(t, num_layers=1), ("temporaries",), message, step="for-loop")


# -- 3 · block: what one block keeps grows linearly with each size, so each size is judged by the growth that it alone brings


def kept_by_a_block(config: LlamaConfig, batch: int, seq: int) -> int:
    """The difference that a second block makes to what forward keeps."""
    one, two = (measured(replace(config, num_layers=layers), batch, seq) for layers in (1, 2))
    return before_loss(two, Part.ACTIVATIONS) - before_loss(one, Part.ACTIVATIONS)


def block_case(t) -> tuple[LlamaConfig, int, int]:
    return drawn(t, vocab_size=512, tied_embeddings=True), t.integer(1, 3), 32 * t.integer(2, 5)


def block_growth(student, t, config: LlamaConfig, batch: int, seq: int, **more) -> tuple[float, int]:
    """By how much ``block_bytes`` grows from ``config`` to the one with ``more``: the student's and the measured growth."""
    larger = replace(config, **more)
    got = [t.number(student.block_bytes(each, batch, seq), "block_bytes(config, batch, seq)") for each in (config, larger)]
    return got[1] - got[0], kept_by_a_block(larger, batch, seq) - kept_by_a_block(config, batch, seq)


@check("block", points=2)
def check_block_mlp(student, t):
    "What the MLP keeps of its wide tensors"
    config, batch, seq = block_case(t)
    got, want = block_growth(student, t, config, batch, seq, intermediate=2 * config.intermediate)
    t.that(
        near(got, want, 0.04),
        "With twice the intermediate size your block keeps {got} more bytes a token, measured {want}. Count the bf16 rows of that width: gate, "
        "silu(gate), up, and their product.",
        got=got / (batch * seq),
        want=want / (batch * seq),
    )


@check("block", points=1)
def check_block_queries(student, t):
    "What attention keeps of the queries' width"
    config, batch, seq = block_case(t)
    got, want = block_growth(student, t, config, batch, seq, num_heads=2 * config.num_heads)
    t.that(
        near(got, want, 0.05),
        "With twice the query heads your block keeps {got} more bytes a token, measured {want}. Two bf16 rows have the width num_heads x head_dim: "
        "the queries and the output of attention.",
        got=got / (batch * seq),
        want=want / (batch * seq),
    )


# -- 4 · activations


@check("activations", points=2)
def check_everything_kept(student, t):
    "What forward keeps without checkpointing"
    config, batch, seq = drawn(t, num_layers=t.integer(4, 6), vocab_size=512), t.integer(1, 3), 32 * t.integer(2, 5)
    got = entry(t, student.activation_bytes(config, batch, seq), "activations", "activation_bytes(config, batch, seq)")
    want = before_loss(measured(config, batch, seq), Part.ACTIVATIONS)
    t.that(
        near(got, want, 0.15),
        "activations are {got:,} bytes, measured {want:,}: every block keeps block_bytes, and there are num_layers.",
        got=got,
        want=want,
    )


@check("activations", points=1)
def check_checkpointing(student, t):
    "With checkpointing a block keeps its input in fp32"
    config, batch, seq = drawn(t, num_layers=1, vocab_size=512), t.integer(1, 3), 32 * t.integer(2, 5)
    more = replace(config, num_layers=1 + t.integer(1, 2))
    what = "activation_bytes(config, batch, seq, checkpointing=True)"
    got = [entry(t, student.activation_bytes(each, batch, seq, checkpointing=True), "activations", what) for each in (config, more)]
    want = [before_loss(measured(each, batch, seq, checkpointing=True), Part.ACTIVATIONS) for each in (config, more)]
    t.that(
        near(got[1] - got[0], want[1] - want[0], 0.02),
        "{blocks} more checkpointed blocks keep {got} bytes in your count, measured {want}: each keeps its input, (batch, seq, hidden) in fp32.",
        blocks=more.num_layers - config.num_layers,
        got=got[1] - got[0],
        want=want[1] - want[0],
    )


@check("activations", points=1)
def check_logits(student, t):
    "One tensor of logits in fp32"
    config, batch, seq = drawn(t, num_layers=1), t.integer(1, 3), 32 * t.integer(2, 5)
    for checkpointing in (False, True):
        got = entry(t, student.activation_bytes(config, batch, seq, checkpointing=checkpointing), "logits", "activation_bytes(...)")
        peak = measured(config, batch, seq, checkpointing=checkpointing).peak_by_part[Part.LOGITS_AND_LOSS]
        t.that(
            near(3 * got, peak, 0.05),
            "three tensors of your logits are {got:,} bytes; measured, three of them are {want:,}",
            got=3 * got,
            want=peak,
        )


# -- 5 · peak


def moment(student, t, name: str, config: LlamaConfig, batch: int, seq: int, **settings):
    return entry(t, student.step_peak(config, batch, seq, **settings), name, "step_peak(...)")


def peak_case(t, **fixed) -> tuple[LlamaConfig, int, int]:
    return drawn(t, **{"num_layers": 1, **fixed}), t.integer(1, 2), 64 * t.integer(2, 4)


@check("peak", points=1)
def check_loss(student, t):
    "The moment when the loss has been computed"
    config, batch, seq = peak_case(t)
    got = moment(student, t, "loss", config, batch, seq, step="fused")
    want = measured(config, batch, seq).peak_by_phase[Phase.LOSS]
    t.that(
        near(got, want, 0.02),
        'at "loss" {got:,} bytes are held, measured {want:,}: no gradient yet, but bf16 copies, activations and 2.5 logits',
        got=got,
        want=want,
    )


@check("peak", points=1)
def check_loss_gradient(student, t):
    "The moment when backward has just begun"
    config, batch, seq = peak_case(t)
    got = moment(student, t, "loss gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq), Part.LOGITS_AND_LOSS, Phase.BACKWARD)
    t.that(
        near(got, want, 0.02),
        'at "loss gradient" {got:,} bytes are held, measured {want:,}: three logits now, and still no gradient of a weight',
        got=got,
        want=want,
    )


@check("peak", points=2)
def check_last_gradient(student, t):
    "The moment when backward reaches a tied embedding"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    got = moment(student, t, "last gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq), Part.GRADIENTS, Phase.BACKWARD)
    t.that(
        near(got, want, 0.03),
        'at "last gradient" {got:,} bytes are held, measured {want:,}: a tied embedding has a gradient from each use, and their sum',
        got=got,
        want=want,
    )


@check("peak", points=1)
def check_optimizer_step(student, t):
    "The moment of the optimiser's step"
    config, batch, seq = peak_case(t)
    step = t.choice(["foreach", "for-loop"])
    got = moment(student, t, "optimizer step", config, batch, seq, step=step)
    want = measured(config, batch, seq, step).peak_by_phase[Phase.OPTIMIZER]
    t.that(
        near(got, want, 0.02),
        'at "optimizer step" ({step}) {got:,} bytes are held, measured {want:,}: the state, and the temporaries of the step',
        step=step,
        got=got,
        want=want,
    )


# -- 6 · fits


def card(usable: float, memory: float) -> Gpu:
    return replace(gpu("a100-80"), name="a-gpu", usable_bytes=int(usable), memory_bytes=int(memory))


def says(student, t, wanted: bool, message: str, *args, **settings) -> None:
    got = student.fits(*args, **settings)
    t.that(type(got) is bool, "fits(...) should be True or False, not {got}", got=got)
    t.that(got is wanted, message)


@check("fits", points=2)
def check_usable(student, t):
    "Usable memory decides, not the memory on the box"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    peak = measured(config, batch, seq).peak_bytes
    enough, short = card(1.1 * peak, 2 * peak), card(0.9 * peak, 2 * peak)
    says(student, t, True, "This step needs a tenth less than the GPU's usable memory: it fits.", config, enough, batch, seq, step="fused")
    says(
        student,
        t,
        False,
        "This step needs more than usable_bytes, though less than memory_bytes: it does not fit.",
        config,
        short,
        batch,
        seq,
        step="fused",
    )


# -- 7 · largest


@scenario
def search(student, rank, world, limit, budget):
    asked = []

    def fits(batch):
        asked.append(batch)
        if type(batch) is not int or batch < 1:
            raise ValueError(f"fits was asked for a batch of {batch!r}: ask for whole numbers from 1 up")
        if len(asked) > budget:
            raise RuntimeError(f"fits was asked more than {budget} times: double until it does not fit, then halve the gap")
        return batch <= limit

    return student.largest_batch(fits)


def found(student, t, limit: int, budget: int) -> int:
    return t.number(student.ranks(search, [{"limit": limit, "budget": budget}]).results[0], "largest_batch(fits)")


@check("largest", points=2)
def check_exact(student, t):
    "The answer is exact"
    power = 2 ** t.integer(2, 4)
    for limit in (1, power - 1, power, power + 1, t.integer(18, 60)):
        got = found(student, t, limit, budget=200)
        t.that(got == limit, "batches up to {limit} fit, your answer is {got}", limit=limit, got=got)


@check("largest", points=1)
def check_nothing_fits(student, t):
    "Nothing fits: the answer is 0"
    got = found(student, t, 0, budget=200)
    t.that(got == 0, "not even one sequence fits, your answer is {got}: it should be 0", got=got)


# -- 8 · ranks


def sharing(t, config: LlamaConfig, seq: int, largest: int) -> tuple[Gpu, float]:
    """A GPU on which ``largest`` sequences fit and one more does not, by measurement."""
    peaks = [measured(config, batch, seq).peak_bytes for batch in (largest, largest + 1)]
    usable = sum(peaks) / 2
    return card(usable, usable), usable


@check("ranks", points=2)
def check_ranks(student, t):
    "As few ranks as the batch allows"
    config, seq, largest = drawn(t, num_layers=2, tied_embeddings=True), 384, t.integer(2, 3)
    gpu_drawn, _ = sharing(t, config, seq, largest)
    for global_batch in (largest * t.integer(3, 9), largest * t.integer(3, 9) + 1):
        got = t.number(student.ranks_needed(config, gpu_drawn, global_batch, seq, step="fused"), "ranks_needed(...)")
        most = -(-global_batch // max(int(got), 1))
        t.that(
            got >= 1 and most <= largest,
            "on {got} ranks a rank has {most} of {all} sequences, but only {largest} fit",
            got=got,
            most=most,
            all=global_batch,
            largest=largest,
        )
        if got > 1:
            fewer = -(-global_batch // (int(got) - 1))
            t.that(
                fewer > largest,
                "{got} ranks for {all} sequences, but one rank less is enough: {largest} fit",
                got=got,
                all=global_batch,
                largest=largest,
            )


# -- 9 · loss


@scenario
def one_gradient(student, rank, world, inputs, targets, weight):
    weight = weight.clone().requires_grad_()
    loss = student.rank_loss(inputs @ weight, targets)
    if type(loss) is not torch.Tensor or loss.numel() != 1:
        raise TypeError("rank_loss should return a tensor with one number, the loss")
    loss.backward()
    dist.all_reduce(weight.grad)
    return weight.grad / world, loss.detach()  # the average is what DDP does


def gradients(student, t, valid: list[int], tokens: int = 12):
    """(averaged gradient, loss) of each rank, and the twin's gradient: one process with all tokens. ``valid``: tokens to learn from, by rank."""
    hidden, vocab = t.integer(3, 6), t.integer(5, 9)
    weight, inputs, targets = t.normal(hidden, vocab, dtype=torch.float64), [], []
    for number in valid:
        inputs.append(t.normal(2, tokens // 2, hidden, dtype=torch.float64))
        own = t.integers(0, vocab - 1, tokens)
        own[t.shuffled(range(tokens))[number:]] = IGNORED
        targets.append(own.view(2, tokens // 2))
    run = student.ranks(one_gradient, [{"inputs": x, "targets": y, "weight": weight} for x, y in zip(inputs, targets)])
    alone = weight.clone().requires_grad_()
    F.cross_entropy((torch.cat(inputs) @ alone).flatten(0, 1), torch.cat(targets).flatten(), ignore_index=IGNORED).backward()
    return [t.items(result, 2, "the result of a rank") for result in run.results], alone.grad


def same_direction(t, ranks, want: torch.Tensor, message: str) -> None:
    for rank, (got, _) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        cosine = float(F.cosine_similarity(got.flatten(), want.flatten(), dim=0))
        t.that(cosine > 1 - 1e-10, message)


def same_size(t, ranks, want: torch.Tensor, message: str, **values) -> None:
    for rank, (got, _) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        ratio = float(got.norm() / want.norm())
        t.that(near(ratio, 1.0, 1e-10), message, **values, **({"ratio": ratio} if "{ratio" in message else {}))


@check("loss", points=2, seconds=30)
def check_weighing(student, t):
    "Every token of every rank has the same weight"
    ranks, want = gradients(student, t, t.shuffled([t.integer(2, 4), t.integer(8, 11)]))
    same_direction(
        t,
        ranks,
        want,
        "The averaged gradient points elsewhere than that of the whole batch: a token of a rank with few tokens has another weight than one of a rank with many.",
    )


@check("loss", points=2, seconds=30)
def check_size(student, t):
    "The averaged gradient has the right size"
    ranks, want = gradients(student, t, [12, 12])
    same_size(
        t,
        ranks,
        want,
        "On 2 ranks with equally many tokens the averaged gradient is {ratio:.3g} times that of the whole batch: DDP divides by the number of ranks, once.",
    )


# -- quiz

QUIZ = {
    "q1": Question(
        "Llama 3.2 3B, batch 1, AdamW with foreach: when is the memory of a rank largest?",
        {"a": "at the end of forward", "b": "in the optimiser's step", "c": "when backward begins", "d": "when the weights are loaded"},
    ),
    "q2": Question(
        "You double the number of ranks and keep the batch of each rank. The memory of a rank ...",
        {"a": "is halved", "b": "loses its gradients", "c": "stays the same", "d": "doubles"},
    ),
    "q3": Question(
        "What does activation checkpointing leave as it is?",
        {"a": "the logits", "b": "the activations of the MLP", "c": "the time of a step", "d": "what attention keeps"},
    ),
    "q4": Question(
        "Four ranks hold 100, 100, 100 and 20 valid tokens. Each calls backward on its own mean. Then a token of the last rank weighs ...",
        {"a": "as much as the others", "b": "a fifth of the others", "c": "four times the others", "d": "five times the others"},
    ),
    "q5": Question(
        "Weights and gradients in bf16, with an fp32 copy of the weights and two fp32 moments: how does the state compare with fp32 weights and AdamW?",
        {"a": "half as large", "b": "the same: 16 bytes a parameter", "c": "12 bytes a parameter", "d": "a quarter smaller"},
    ),
    "q6": Question(
        "A step of 35 GiB on an A100 of 40 GB, PyTorch's DDP with its default options. The counts were made without DDP. What comes on top?",
        {
            "a": "nothing: the gradients are averaged in place",
            "b": "one bucket of 25 MiB",
            "c": "buckets as large as all gradients together",
            "d": "a copy of weights, gradients and optimiser state",
        },
    ),
}
complete = quiz_complete(QUIZ, points=1)

# -- hints

HINTS = {
    "parameters": [
        "Write down the shape of each matrix of one block; its parameters are the product. Biases do not exist here.",
        "q_proj is (num_heads x head_dim, hidden). Which two of the four attention matrices are narrower?",
        "attention = num_layers x hidden x (2 x query width + 2 x key width); norms = (2 x num_layers + 1) x hidden.",
    ],
    "state": [
        "Everything but the temporaries is a whole number of fp32 tensors for each parameter.",
        "Only AdamW has temporaries. For foreach they are as large as all weights; for the for-loop look for the largest single tensor.",
        "Two dicts do it: how many moments each optimiser has, and how many bytes each kind of step needs. Set the temporaries to 0 unless it is AdamW.",
    ],
    "block": [
        "Sort the rows of the table by shape: hidden wide, num_heads x head_dim wide, num_kv_heads x head_dim wide, intermediate wide.",
        "hidden wide: two fp32 tensors for each norm, and one bf16 copy for each matrix that reads a norm's output (q, k, v, gate, up).",
        "bytes per token = a x hidden + b x (query width) + c x (key width) + d x intermediate; read a, b, c and d off the table. Then times batch x seq.",
    ],
    "activations": [
        "One tensor (batch, seq, hidden) in fp32 is the unit of everything here but the logits.",
        "What a block keeps depends on checkpointing; what the last norm keeps does not.",
        "activations = num_layers x (one unit, or block_bytes) + two units.",
    ],
    "peak": [
        "Begin with what is there at every moment: weights, optimiser state, and perhaps a copy of the gradients. Add a column of the table at a time.",
        "The bf16 copies have 2 bytes for each number of attention, mlp and the output projection, which is vocab_size x hidden also when it is tied.",
        "always + bf16 copies + activations + 2.5 or 3 logits; always + gradients + copies of the embedding; always + gradients + temporaries.",
    ],
    "fits": [
        "A step needs the largest of its moments.",
        "max(....values()), and pass **settings on.",
        "Compare the largest value of step_peak with card.usable_bytes, with <=.",
    ],
    "largest": [
        "Keep two numbers: one that is known to fit, and one that is known not to.",
        "0 always fits and needs no question. Double the other until it does not fit; then ask for the middle until they are neighbours.",
        "low, high = 0, 1; while fits(high): low, high = high, 2 * high; then, while high - low > 1, move one of them to the middle.",
    ],
    "ranks": [
        "You have a function that finds the largest batch and one that says what fits. largest_batch wants a function of the batch alone.",
        "lambda batch: fits(config, card, batch, seq, **settings)",
        "Divide the global batch by the largest one and round up; but first think of what to do when the largest one is 0.",
    ],
    "loss": [
        "What would one process with all tokens divide the sum of all token losses by? Who knows that number?",
        'Count the valid targets of all ranks with dist.all_reduce. Use reduction="sum": a mean over no token is NaN.',
        "DDP will divide by world_size; you want a division by the number of valid tokens of all ranks instead. So multiply by one and divide by the other.",
    ],
    "quiz": [
        "Questions 1, 3 and 6 are answered by the plots of steps 5 and 4, and by the table of step 6.",
        "Questions 2 and 5: count bytes for each parameter.",
        "Question 4: what is one token's share in a mean of 100, and in one of 20?",
    ],
}

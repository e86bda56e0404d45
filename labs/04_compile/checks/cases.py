"""The parts that visible and hidden checks share: random inputs, and the proof that a graph is the whole
function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Run, Wrong
from dlo_lib.grading.checks.graphs import Recorded
from dlo_lib.models import Llama, LlamaConfig

from .scenarios import compiled_on_lengths
from .twins import cheapest, cost

SLACK = 1e-9
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
BREAKS = (
    "{call} became {number} graphs: between them Python had to read a value (an `if` on a tensor, .item(), "
    "print, x[mask]). `explain({call}, ...)` shows the line."
)

# -- a graph is the whole function


def one_graph(t, run: Run, call: str) -> Recorded:
    """Return the recorded graph, and check that there is exactly one and that it was run."""
    recorded = Recorded.read(run.results[0])
    number = len(recorded.graphs)
    message = "{call} became no graph. If there is a break within a loop, the whole function runs in Python"
    t.that(bool(number > 0 and recorded.calls), message, call=call)
    t.that(bool(number == 1), BREAKS, call=call, number=number)
    return recorded


def listed(recorded: Mapping[str, object], name: str) -> list[dict]:
    """The dicts in a recorded list; the recorded data may have any type."""
    found = recorded.get(name)
    return [each for each in found if type(each) is dict] if type(found) is list else []


def nearest(outputs: list[Tensor], want: Tensor) -> Tensor | None:
    """The output of a graph that is nearest to ``want``, with its shape and dtype."""

    def distance(output: Tensor) -> float:
        return float((output.double() - want.double()).abs().nan_to_num(1e30).sum())

    alike = [output for output in outputs if output.shape == want.shape and output.dtype == want.dtype]
    return min(alike, key=distance, default=None)


def the_graph_gives(t, recorded: Recorded, inputs: dict[str, Tensor], want: Tensor, call: str) -> None:
    """Check that the graph alone, run on other inputs, gives the expected results."""
    same = nearest(recorded.replayed(recorded.calls[0], inputs), want)
    message = (
        "{call} is one graph, but this graph gives wrong results for other inputs: a decision that depends "
        "on values or sizes was fixed while the graph was made"
    )
    t.that(same is not None and torch.allclose(same, want, rtol=1e-4, atol=1e-5), message, call=call)


def largest_tensor(recorded: Recorded, inputs: dict[str, Tensor]) -> int:
    """The elements of the largest tensor that the graphs make; 0 if none can run here, which another check
    reports."""
    largest = 0
    for call in recorded.calls:
        try:
            operations = recorded.observed(call, inputs)
        except Wrong:
            continue
        largest = max([largest, *(operation.makes for operation in operations)])
    return largest


# -- cases


def clip_case(t, above: bool) -> dict[str, Tensor]:
    gradient = t.normal(t.integer(4, 9), 5)
    factor = t.uniform(0.2, 0.8) if above else t.uniform(1.2, 3.0)
    return {"gradient": gradient, "limit": gradient.norm() * factor}


def mean_case(t, rows: int, width: int) -> dict[str, Tensor]:
    mask = t.integers(0, 1, rows, width).bool()
    mask[0, 0] = True
    return {"losses": t.normal(rows, width).abs(), "mask": mask}


def drawn_counts(t, number: int, longest: int) -> dict[int, int]:
    lengths = t.shuffled(range(3, longest))[:number]
    return {length: t.integer(1, 60) for length in lengths}


def adamw_case(t, rows: int, width: int) -> dict[str, Tensor]:
    step, lr = torch.tensor(float(t.integer(1, 50))), torch.tensor(t.uniform(1e-3, 1e-1))
    moments = {"first": 0.1 * t.normal(rows, width), "second": 0.01 * t.normal(rows, width).square()}
    case = {"parameter": t.normal(rows, width), "gradient": t.normal(rows, width)}
    return case | moments | {"step": step, "lr": lr}


def llama_case(t) -> tuple[Llama, dict]:
    sizes = {
        "vocab_size": 31,
        "hidden": 12,
        "intermediate": 20,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 6,
    }
    config = LlamaConfig(**sizes, num_layers=t.integer(3, 4))
    model = Llama(config)
    state = {name: value + 0.1 * t.normal(*value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model, {"config": config, "state": state, "tokens": t.integers(0, 30, 2, t.integer(5, 9))}


def lengths_recorded(student, t) -> tuple[Recorded, int, int]:
    """Return the graphs of four lengths, the batch size and the width."""
    batch, width = t.integer(2, 4), t.integer(2, 5)
    batches = [t.normal(batch, length, width) for length in t.shuffled([5, 7, 11, 13])]
    found = student.ranks(compiled_on_lengths, [{"batches": batches}]).results[0]
    if type(found) is dict and "marked" in found:
        message = "mark_length returned {kind}: it must return the batch"
        t.that(False, message, kind=found["marked"].replace("NoneType", "None"))
    return Recorded.read(found), batch, width


# -- measures


def padded_right(student, t, length: int, buckets: list[int]) -> None:
    """Check the smallest bucket, the same tokens, and a padding without targets."""
    tokens, targets = t.integers(1, 99, 3, length), t.integers(0, 99, 3, length)
    bucket = min(each for each in buckets if each >= length)
    call = f"pad_to_bucket of length {length}, buckets {buckets}"
    got_tokens, got_targets = t.items(student.pad_to_bucket(tokens, targets, buckets), 2, call)
    for got, name in ((got_tokens, "tokens"), (got_targets, "targets")):
        t.tensor(got, "{call}: the {name}", shape=(3, bucket), dtype=torch.int64, call=call, name=name)
    kept = torch.equal(got_tokens[:, :length], tokens) and torch.equal(got_targets[:, :length], targets)
    t.that(kept, "{call}: the original tokens and targets must come first, unchanged", call=call)
    message = "{call}: a padded token has the target -100, so that the loss ignores it"
    t.that(bool((got_targets[:, length:] == -100).all()), message, call=call)
    padding = got_tokens[:, length:]
    message = "{call}: the padding must be a valid token"
    t.that(bool(((padding >= 0) & (padding < 100)).all()), message, call=call)


Costs = tuple[dict[int, int], float, float]


"""Counts of lengths, the seconds of a compilation, and the seconds of a token."""


def misleading_counts(t, *searches: Callable[[Mapping[int, int], float, float], float]) -> Costs:
    """Draw lengths for which each of the greedy ``searches`` costs at least 0.5 % more than the cheapest
    buckets."""
    while True:  # about one draw in thirty
        counts, compile_seconds = drawn_counts(t, 10, 60), t.uniform(2.0, 6.0)
        case = counts, compile_seconds, 1.5 * compile_seconds / (30 * max(counts))
        enough = 1.005 * cheapest(*case)
        if all(search(*case) > enough for search in searches):
            return case


def as_cheap(student, t, case: Costs, least: float) -> None:
    """Check that the buckets hold every length and cost no more than the cheapest buckets."""
    counts, got, call = case[0], student.choose_buckets(*case), "choose_buckets for {lengths} lengths"
    integers = type(got) is list and all(type(each) is int for each in got)
    t.that(integers, call + ": return a list of integers", lengths=len(counts))
    fits = bool(got) and max(got) >= max(counts)
    t.that(fits, call + ": the longest sequence fits into no bucket", lengths=len(counts))
    found = cost(got, *case)
    message = call + (
        ": your {buckets} buckets cost {found:.4g} s, {least:.4g} s are possible. Compare each bucket's "
        "compilation with the padding it saves."
    )
    values = {"lengths": len(counts), "buckets": len(got), "found": found, "least": least}
    t.that(bool(found <= least * (1 + SLACK)), message, **values)


def as_soon(student, t, compile_seconds: float, eager: float, compiled: float) -> None:
    """Check ``break_even`` on whole eighths of seconds, which floating point represents exactly."""
    steps, most = 0, 100_000
    while steps <= most and compile_seconds + steps * compiled > steps * eager:
        steps += 1
    got = student.break_even(compile_seconds, eager, compiled)
    call = f"break_even({compile_seconds:g}, {eager:g}, {compiled:g})"
    free = "{call} is {got}: without a compilation, 0 steps already take no longer, so it is 0"
    t.that(bool(compile_seconds) or (type(got) is int and got == 0), free, call=call, got=got)
    t.equal(got, steps if steps <= most else None, call)

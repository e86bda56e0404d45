"""``parity``: run the trial on ranks and the twin here, and judge each step until one differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dlo_lib.base.errors import UserError
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.planner.parity.directions import Call, Reading, TrainerFault
from dlo_lib.planner.parity.float64 import in_float64
from dlo_lib.planner.parity.marked import marked_reading, run_marked
from dlo_lib.planner.parity.parts import Gradients, ParameterPart, parts_of
from dlo_lib.planner.parity.script import marks, samples
from dlo_lib.planner.parity.trial import RankRecord, checksums, run_trial
from dlo_lib.planner.parity.twin import Twin, total_norm
from dlo_lib.planner.parity.verdict import GRADIENT_TOLERANCE, ParityFinding, StepJudge, difference

Held = dict[ParameterPart, Tensor]
"""What the ranks hold."""
Judged = tuple[StepJudge, list[ParityFinding]]
"""A step, and what of it differs."""


@dataclass(frozen=True)
class ParityReport:
    """The result of a comparison.

    Attributes:
        ranks, steps: of the trial; after the first step that differs, none is compared.
        parameters: how many tensors the twin has.
        largest: the largest relative difference of a gradient or an update.
        findings: what differs; none for a trainer that computes what one process computes.
        notes: what the steps did not try.
    """

    ranks: int
    steps: int
    parameters: int
    largest: float
    findings: tuple[ParityFinding, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the trainer computes what one process computes."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """Return values for JSON."""
        found = [asdict(finding) | {"fault": finding.fault.value} for finding in self.findings]
        return asdict(self) | {"equal": self.equal, "findings": found}


def parity(
    script: str | Path,
    ranks: int = 2,
    steps: int = 3,
    arguments: Sequence[str] = (),
    max_norm: float | None = None,
    same_data: bool = False,
    timeout: float | None = None,
) -> ParityReport:
    """Compare a trainer on ranks with one process, in float64.

    Args:
        script: a file with ``build()``, or a script of torchrun with two marked lines (``parity.script``).
        ranks: how many.
        steps: how many steps of the optimiser.
        arguments: of a script of torchrun.
        max_norm: of the trainer's clipping, if it does not call ``torch.nn.utils.clip_grad_norm_``.
        same_data: ranks of a script of torchrun read the same samples on purpose (tensor parallelism).
        timeout: seconds for the trial; None waits forever.

    Raises:
        UserError: the script offers no trainer, or one that cannot be compared; or it fails.
    """
    file = Path(script).resolve()
    lines = marks(file)
    try:
        if lines:
            records = run_ranks(run_marked, ranks, file, lines, list(arguments), steps, timeout=timeout)
        else:
            records = run_ranks(run_trial, ranks, file, steps, timeout=timeout)
    except RankFailure as failure:
        raise UserError(_in_one_line(file, failure)) from failure
    try:
        return judge(file, records, max_norm, same_data)
    except UserError:
        raise
    except Exception as error:  # of code of others, which runs on ranks only so far
        said = (str(error) or "no message").splitlines()[0]
        raise UserError(f"{file.name} fails in one process: {type(error).__name__}: {said}") from error


def _in_one_line(file: Path, failure: RankFailure) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    place = next((line for line in reversed(lines) if file.name in line), "")
    said = lines[0] if lines else type(failure).__name__
    return f"{file.name} fails in the trial: {said}" + (f" ({place})" if place and place != said else "")


def judge(
    file: Path, records: list[RankRecord], max_norm: float | None = None, same_data: bool = False
) -> ParityReport:
    """Compare the records of the ranks of a trial with one process.

    Raises:
        UserError: the ranks cannot be compared with it.
    """
    for record in records:
        record.max_norm = max_norm if record.max_norm is None else record.max_norm
    if records[0].start:
        return _judge_marked(records, same_data)
    if dist.is_initialized():
        raise UserError("the twin runs in a process without a process group: call parity in another process")
    with in_float64():
        return _judge_file(Twin(file), records)


def _judge_file(twin: Twin, records: list[RankRecord]) -> ParityReport:
    def judged(number: int, held: Held, earlier: Gradients | None) -> Judged:
        batch, before = twin.next_batch(), twin.values()
        _require_same_batch(records, number, batch)
        reads = _reads(records, number)
        step = StepJudge(
            number, parts, records, _reading(twin, batch, reads, earlier), lambda: twin.uses(batch)
        )
        step.gradients()
        after = twin.step(step.asked)
        fine = step.updates(before, after, held)
        findings = step.verdict.findings
        if findings and (twice := _same_rows(reads, samples(batch), number)):
            findings = [twice]
        return step, _left(findings, fine)

    parts = parts_of(records, twin.values(), twin.aliases)
    start = _start(parts, records, twin.values())
    if isinstance(start, ParityFinding):
        return _report(records, parts, 0.0, [start], None)
    twin.load(start)
    return _judge_steps(parts, records, judged)


def _judge_marked(records: list[RankRecord], same_data: bool) -> ParityReport:
    def judged(number: int, held: Held, earlier: Gradients | None) -> Judged:
        reading, doubled = marked_reading(records, number, earlier)
        step = StepJudge(number, parts, records, reading, dict)
        step.gradients()
        before = first.steps[number - 1].twin if number else first.start
        findings = _left(step.verdict.findings, step.updates(before, first.steps[number].twin, held))
        if doubled and not same_data:
            said = f"ranks {doubled[0]} and {doubled[1]} read the same samples: give each rank its own share"
            hint = " (or --same-data, if they share the work on them)"
            findings = [ParityFinding(TrainerFault.SAME_DATA, number + 1, said + hint), *findings]
        return step, findings

    first = records[0]
    parts = parts_of(records, first.start, first.aliases)
    start = _start(parts, records, first.start)
    if isinstance(start, ParityFinding):
        return _report(records, parts, 0.0, [start], None)
    return _judge_steps(parts, records, judged)


def _judge_steps(
    parts: list[ParameterPart],
    records: list[RankRecord],
    judged: Callable[[int, Held, Gradients | None], Judged],
) -> ParityReport:
    """Judge the steps until one has findings.

    Args:
        judged: judges a step, given its number, the parts that the ranks hold before it, and the gradients
            of the step before.
    """
    held, largest = _held(parts, records), 0.0
    earlier: Gradients | None = None
    notes, findings = list[str](), list[ParityFinding]()
    for number in range(len(records[0].steps)):
        step, findings = judged(number, held, earlier)
        largest = max(largest, step.verdict.largest)
        notes = _not_tried(step.max_norm, step.reading.right)
        if findings:
            break
        held = {part: records[part.rank].steps[number].after[part.key] for part in parts}
        earlier = step.asked
    return _report(records, parts, largest, findings, notes)


def _left(findings: list[ParityFinding], fine: bool) -> list[ParityFinding]:
    """Return the findings of a step whose updates are ``fine`` or not: an optimiser may add the gradients of
    the ranks itself."""
    if fine and all(finding.fault is TrainerFault.NOT_REDUCED for finding in findings):
        return []
    return findings


def _report(
    records: list[RankRecord],
    parts: list[ParameterPart],
    largest: float,
    found: list[ParityFinding],
    notes: list[str] | None,
) -> ParityReport:
    names, steps = {part.name for part in parts}, len(records[0].steps)
    return ParityReport(len(records), steps, len(names), largest, tuple(found), tuple(notes or ()))


def _held(parts: list[ParameterPart], records: list[RankRecord]) -> Held:
    starts = [{held.name: held.start for held in record.parts} for record in records]
    return {part: starts[part.rank][part.key] for part in parts}


def _start(
    parts: list[ParameterPart], records: list[RankRecord], twin: Gradients
) -> Gradients | ParityFinding:
    """Return the parameters with which the ranks begin, or that two ranks begin with different ones.

    Raises:
        UserError: no rank has a part of a parameter, whose start in the twin is another.
    """
    whole = {name: torch.full_like(one, torch.nan) for name, one in twin.items()}
    for part, tensor in _held(parts, records).items():
        there = part.of(whole)
        known = ~there.isnan()
        if known.any() and not torch.equal(there[known], tensor[known]):
            said = (
                f"{part.name} begins with other values on rank {part.rank} than on a rank before it: "
                "use one seed, or broadcast the parameters of rank 0"
            )
            return ParityFinding(TrainerFault.OUT_OF_STEP, 1, said, (part.name,))
        there.copy_(tensor)
    for name, one in whole.items():
        missing = one.isnan()
        one[missing] = twin[name][missing]
    return whole


def _require_same_batch(records: list[RankRecord], number: int, batch: Any) -> None:
    """Check that the ranks have the global batch of one process.

    Raises:
        UserError: a rank has another one.
    """
    right = checksums(batch)
    for rank, record in enumerate(records):
        if record.steps[number].batch != right:
            raise UserError(
                f"batch {number + 1} of rank {rank} is not that of one process: build() must give the same "
                "global batches everywhere (draw them with a seed), and step() takes the share of the rank"
            )


def _reads(records: list[RankRecord], number: int) -> list[list[tuple[int, ...] | None]]:
    """Return the rows that the calls of each rank read; none for a rank that only receives activations."""
    each = [record.steps[number].reads for record in records]
    some = any(rows is not None for calls in each for rows in calls)
    # A stage of a pipeline reads the first micro-batch once more to learn the shape of its output.
    each = [list(dict.fromkeys(calls)) for calls in each]
    return [[] if some and calls == [None] else calls for calls in each]


def _reading(
    twin: Twin, batch: Any, reads: list[list[tuple[int, ...] | None]], earlier: Gradients | None
) -> Reading:
    right = twin.gradients(batch)
    counted, ignored = twin.counting.count, twin.counting.ignored
    known = any(reads) and all(rows is not None for calls in reads for rows in calls)

    def mean_of(calls: list[Call]) -> Gradients:
        rows: dict[int, None] = {}
        for rank, call in calls:
            rows |= dict.fromkeys(reads[rank][call] or ())
        return twin.gradients(batch, rows)

    padded = twin.gradients(batch, padded=True) if ignored else None
    if padded is not None and all(
        difference(padded[name], one, 0.0) < GRADIENT_TOLERANCE for name, one in right.items()
    ):
        padded = None
    shares = {"that the loss does not ignore": counted / (counted + ignored)} if ignored else {}
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.bool:
            shares["that a mask keeps"] = float(leaf.double().mean())
    return Reading(
        right, [len(calls) for calls in reads], mean_of if known else None, padded, shares, earlier,
        len({tuple(calls) for calls in reads if calls}),
    )  # fmt: skip


def _same_rows(reads: list[list[tuple[int, ...] | None]], count: int, number: int) -> ParityFinding | None:
    """The finding that rows of the batch are read by no rank, while others are read twice."""
    each = [{row for rows in calls for row in rows or ()} for calls in reads]
    missing = sorted(set(range(count)) - set().union(*each))
    if not missing or not any(each):
        return None
    pairs = [(one, two) for two in range(len(each)) for one in range(two) if each[one] & each[two]]
    said = f"{len(missing)} of the {count} samples of the global batch are read by no rank"
    if pairs:
        same = [pairs[0][0], *(two for one, two in pairs if one == pairs[0][0])]
        said = f"ranks {', '.join(map(str, same[:-1]))} and {same[-1]} read the same samples, and {said}"
    return ParityFinding(TrainerFault.SAME_DATA, number + 1, f"{said}: divide the batch by the rank")


def _not_tried(max_norm: float | None, right: Gradients) -> list[str]:
    if max_norm is None or (norm := total_norm(list(right.values()))) > max_norm:
        return []
    return [f"clipping was not tried: the norm of the gradients, {norm:.3g}, is below {max_norm:g}"]

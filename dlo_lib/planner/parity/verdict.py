"""Compares the ranks of a trainer with the twin in one step, and names the fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlo_lib.planner.parity.directions import Direction, Factor, Reading, TrainerFault, directions, factors
from dlo_lib.planner.parity.parts import Gradients, ParameterPart
from dlo_lib.planner.parity.trial import RankRecord
from dlo_lib.planner.parity.twin import clip, clip_factor, total_norm

GRADIENT_TOLERANCE = 1e-9
"""The largest difference of a gradient relative to its largest element: float64 gives 1e-14."""
UPDATE_TOLERANCE = 1e-7
"""The same for updates: Adam enlarges the rounding of gradients that are nearly zero."""
COARSE = 2e-2
"""The largest relative difference that bfloat16 explains."""


@dataclass(frozen=True)
class ParityFinding:
    """A fault in step ``step`` (from 1), in one sentence; ``parameters``: those that it concerns, none for
    all."""

    fault: TrainerFault
    step: int
    sentence: str
    parameters: tuple[str, ...] = ()


@dataclass
class StepVerdict:
    """The findings of one step and the largest relative difference of a gradient or an update."""

    findings: list[ParityFinding] = field(default_factory=list)
    largest: float = 0.0


def difference(ours: Tensor, twin: Tensor, floor: float) -> float:
    """Return the largest difference of two tensors relative to the largest element of the twin's, which is at
    least ``floor``."""
    if not ours.numel():
        return 0.0
    scale = max(float(twin.abs().max()), floor)
    found = float((ours - twin).abs().max())
    return found / scale if scale else found


def multiple_of(ours: Tensor, twin: Tensor, of_nothing: float = 0.0) -> float:
    """Return the factor by which the twin is nearest to ours; ``of_nothing`` if the twin is zero."""
    square = float(twin.square().sum())
    return float((ours * twin).sum()) / square if square else of_nothing


@dataclass(frozen=True)
class _Fit:
    """How the gradients of a rank are explained: a direction, its factor, and the parameters that differ."""

    direction: Direction
    factor: float
    others: list[ParameterPart]


def fit(ours: Mapping[ParameterPart, Tensor], tried: list[Direction], rank: int, floor: float) -> _Fit | None:
    """Return the direction and the factor that explain the gradients of most parameters of a rank."""
    best: _Fit | None = None
    for direction in tried:
        whole = direction.of_rank(rank)
        ratios = {}
        for part, tensor in ours.items():
            twin = part.of(whole)
            ratio = multiple_of(tensor, twin, of_nothing=1.0)
            if difference(tensor, ratio * twin, floor) < GRADIENT_TOLERANCE:
                ratios[part] = ratio
        weighed = {part: ratio for part, ratio in ratios.items() if float(part.of(whole).abs().max()) > floor}
        if not weighed:
            continue
        factor = _usual(list(weighed.values()))
        others = [
            part for part in ours
            if part not in ratios or (part in weighed and not _close(weighed[part], factor))
        ]  # fmt: skip
        if best is None or len(others) < len(best.others):
            best = _Fit(direction, factor, others)
    if best is None or len(best.others) > len(ours) / 2:
        return None
    return best


def _usual(ratios: list[float]) -> float:
    counted = Counter(round(ratio, 6) for ratio in ratios)
    usual = counted.most_common(1)[0][0]
    return statistics.median(ratio for ratio in ratios if round(ratio, 6) == usual)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-7 * max(abs(other), 1e-12)


class StepJudge:
    """Judges one step. ``uses``: the gradients of each use of each tied parameter, computed when asked."""

    def __init__(
        self,
        number: int,
        parts: list[ParameterPart],
        records: list[RankRecord],
        reading: Reading,
        uses: Callable[[], dict[str, list[Gradients]]],
    ) -> None:
        self.number, self.parts, self.records, self.reading, self.uses = number, parts, records, reading, uses
        self.floor = 1e-6 * max(float(one.abs().max()) for one in reading.right.values() if one.numel())
        self.verdict = StepVerdict()
        norms = [record.max_norm for record in records if record.max_norm is not None]
        self.max_norm = norms[0] if norms else None
        self.asked = clip(reading.right, self.max_norm)
        """The gradients that the optimiser should receive."""

    def say(self, fault: TrainerFault, sentence: str, parameters: tuple[str, ...] = ()) -> None:
        """Add a finding, once."""
        finding = ParityFinding(fault, self.number + 1, sentence, parameters)
        if finding not in self.verdict.findings:
            self.verdict.findings.append(finding)

    def of_rank(self, rank: int, clipped: bool) -> dict[ParameterPart, Tensor]:
        """Return the gradients of the parts of a rank, before or after clipping."""
        step = self.records[rank].steps[self.number]
        known = step.gradients if clipped else step.gradients | step.unclipped
        return {part: known[part.key] for part in self.parts if part.rank == rank}

    def largest(self, clipped: bool, right: Gradients) -> float:
        """Return the largest difference of the gradients of all ranks."""
        return max(
            difference(tensor, part.of(right), self.floor)
            for rank in range(len(self.records))
            for part, tensor in self.of_rank(rank, clipped).items()
        )

    def gradients(self) -> None:
        """Judge the gradients before clipping, then after it."""
        right, was_clipped = self.reading.right, any(r.steps[self.number].unclipped for r in self.records)
        scaled = self.asked
        # A trainer with its own clipping has no gradients before it; then those after it are compared.
        hidden = self.max_norm is not None and not was_clipped
        found = self.largest(False, scaled if hidden else right)
        if found >= GRADIENT_TOLERANCE and hidden and self._clips_wrongly(False):
            found = self.largest(False, self.asked)
        elif found >= GRADIENT_TOLERANCE:
            self._explain(found)
        self.verdict.largest = max(self.verdict.largest, found)
        if was_clipped and not self.verdict.findings:
            found = self.largest(True, scaled)
            if found >= GRADIENT_TOLERANCE:
                if not self._clips_wrongly(True):
                    self.say(TrainerFault.UNKNOWN, "gradients differ after clipping, and not by a factor")
                found = self.largest(True, self.asked)
            self.verdict.largest = max(self.verdict.largest, found)

    def _clips_wrongly(self, clipped: bool) -> bool:
        """Whether the gradients of each rank are right except for a factor of clipping; says it."""
        right = [Direction(None, "", lambda rank: self.reading.right)]
        fits = [
            fit(self.of_rank(rank, clipped), right, rank, self.floor) for rank in range(len(self.records))
        ]
        held = [one for one in fits if one is not None and not one.others]
        if len(held) < len(fits):
            return False
        each = [one.factor for one in held]
        norm = total_norm(list(self.reading.right.values()))
        asked = 1.0 if self.max_norm is None else clip_factor(norm, self.max_norm)
        if all(abs(factor - asked) < 2e-6 / max(norm, 1e-3) for factor in each):
            # Clipped without the 1e-6 of PyTorch; in 2.8, each rank of ``fully_shard`` adds 1e-6.
            self.asked = {name: each[0] * one for name, one in self.reading.right.items()}
            return True
        own = [total_norm([part.of(self.reading.right) for part in self.of_rank(rank, True)])
               for rank in range(len(held))]  # fmt: skip
        of_part = self.max_norm is not None and all(
            abs(factor - clip_factor(one, self.max_norm)) < 1e-5 for factor, one in zip(each, own)
        )
        if not of_part and all(_close(factor, each[0]) for factor in each):
            return False
        said = ", ".join(f"rank {rank} {factor:.4g}" for rank, factor in enumerate(each))
        wanted = f", and all need {asked:.4g}" if self.max_norm is not None else ""
        self.say(
            TrainerFault.CLIPPING,
            f"clipping scales the gradients of {said}{wanted}: each rank clips by the norm of its part only; "
            "add the squared norms of all parts first",
        )
        return True

    def _explain(self, found: float) -> None:
        """Name the fault of gradients that differ."""
        tried, ranks = directions(self.reading), range(len(self.records))
        fits = [fit(self.of_rank(rank, False), tried, rank, self.floor) for rank in ranks]
        known = {rank: one for rank, one in enumerate(fits) if one is not None}
        batch_norm = any(record.batch_norm for record in self.records)
        if len(known) < len(fits):
            if found < COARSE:
                self.say(
                    TrainerFault.PRECISION,
                    f"gradients differ by up to {found:.1e}, and not by a factor: a part of the trainer "
                    "computes in less than float64 (a policy of mixed precision, a cast), or in another way",
                )
            else:
                why = ": BatchNorm takes the statistics of a share, use SyncBatchNorm" if batch_norm else ""
                self.say(
                    TrainerFault.UNKNOWN, f"gradients differ by up to {found:.1e}, by no known fault{why}"
                )
            return
        each = [one.factor for one in known.values()]
        directions_found = {one.direction.said: one.direction for one in known.values()}
        if all(one.direction.fault is None for one in known.values()) and not all(
            _close(factor, each[0]) for factor in each
        ):
            if not self._clips_wrongly(False):
                said = ", ".join(f"rank {rank} {one.factor:.4g}" for rank, one in known.items())
                self.say(TrainerFault.SCALE, f"gradients are those of one process times: {said}")
        else:
            for direction in directions_found.values():
                if direction.fault is TrainerFault.WEIGHTS and batch_norm:
                    self.say(
                        TrainerFault.STATISTICS,
                        "BatchNorm takes the statistics of a share of the batch: use SyncBatchNorm",
                    )
                elif direction.fault is not None:
                    self.say(direction.fault, direction.said)
            if not _close(each[0], 1.0) and set(directions_found) == {""}:
                self._name(each[0])
        for rank, one in known.items():
            for part in one.others:
                self._one_parameter(part, one, rank)

    def _name(self, ratio: float) -> None:
        named: list[Factor] = []
        for factor in factors(self.reading):
            if _close(ratio, factor.value) and all(one.said != factor.said for one in named):
                named.append(factor)
        if not named:
            clips = "; if the trainer clips, give --max-norm" if self.max_norm is None and ratio < 1 else ""
            self.say(TrainerFault.SCALE, f"gradients are {ratio:.6g} of those of one process{clips}")
            return
        kinds = {factor.fault for factor in named}
        said = "; or ".join(factor.said for factor in named)
        if len(kinds) > 1:
            said += ": run with another --ranks to tell which"
        fault = named[0].fault if len(kinds) == 1 else TrainerFault.SCALE
        self.say(fault, f"gradients are {said}")

    def _one_parameter(self, part: ParameterPart, usual: _Fit, rank: int) -> None:
        """Name the fault of a parameter whose gradient differs from what explains the others."""
        ours = self.of_rank(rank, False)[part]
        twin = usual.factor * part.of(usual.direction.of_rank(rank))
        others = [
            self.of_rank(other.rank, False)[other]
            for other in self.parts
            if (other.name, other.slices) == (part.name, part.slices) and other is not part
        ]
        if (uses := self.uses().get(part.name)) is not None:
            columns = torch.stack([part.of(one).flatten() for one in uses], 1)
            weights = torch.linalg.lstsq(columns, ours.flatten()[:, None] / usual.factor).solution
            rest = columns @ weights - ours.flatten()[:, None] / usual.factor
            if float(rest.abs().max()) < 1e-8 * max(float(twin.abs().max()), self.floor):
                same = all(difference(ours, other, self.floor) < GRADIENT_TOLERANCE for other in others)
                where = "" if same else f"on rank {rank} "
                said = " and ".join(f"{round(float(weight), 6) + 0.0:g}" for weight in weights)
                self.say(
                    TrainerFault.TIED,
                    f"{part.name} is tied, and {where}the gradients of its uses count {said} times "
                    "instead of once each: add those of all uses, once",
                    (part.name,),
                )
                return
        if any(difference(ours, other, self.floor) >= GRADIENT_TOLERANCE for other in others):
            self.say(
                TrainerFault.OUT_OF_STEP,
                f"{part.name} has different gradients on the ranks that hold it: average them",
                (part.name,),
            )
            return
        ratio = multiple_of(ours, twin)
        exact = difference(ours, ratio * twin, self.floor) < GRADIENT_TOLERANCE
        how = f"{ratio:.6g} times that of one process" if exact else "not that of one process"
        self.say(
            TrainerFault.OUT_OF_STEP,
            f"the gradient of {part.name} is {how}; those of others are",
            (part.name,),
        )

    def updates(self, before: Gradients, after: Gradients, started: Mapping[ParameterPart, Tensor]) -> bool:
        """Judge the parameters after the step; return whether all updates are right.

        Args:
            before, after: the twin's parameters.
            started: the parts of the ranks before the step.
        """
        moved = {name: after[name] - before[name] for name in after}
        floor = 1e-2 * max(float(one.abs().max()) for one in moved.values())
        wrong: dict[str, str] = {}
        for part in self.parts:
            ours = self.records[part.rank].steps[self.number].after[part.key] - started[part]
            twin = part.of(moved)
            off = difference(ours, twin, floor)
            self.verdict.largest = max(self.verdict.largest, off)
            if off < UPDATE_TOLERANCE:
                continue
            ratio = multiple_of(ours, twin)
            if not float(ours.abs().max()):
                wrong[part.name] = "keeps its value: the optimiser of the ranks does not have it"
            elif difference(ours, ratio * twin, floor) < UPDATE_TOLERANCE:
                wrong[part.name] = f"moves {ratio:.6g} times as far as in one process"
            else:
                wrong[part.name] = "moves otherwise than in one process"
        for said in dict.fromkeys(wrong.values()) if not self.verdict.findings else ():
            names = tuple(name for name, why in wrong.items() if why == said)
            every = len(names) == len({part.name for part in self.parts})
            fault = TrainerFault.UPDATE if every else TrainerFault.OUT_OF_STEP
            shown = "each parameter" if every else ", ".join(names[:3]) + ("", ", …")[len(names) > 3]
            self.say(fault, f"{shown} {said}, with the same gradients", () if every else names)
        return not wrong

"""The tables and costs that the checks compare with, and the sizes that they draw."""

from __future__ import annotations

from dataclasses import dataclass

from dlo_lib.grading.checks.twins import twin
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import Action, B, F, I, Schedule, in_a_loop

MAKERS = {
    "naive": schedules.naive,
    "AFAB": schedules.afab,
    "1F1B": schedules.one_f_one_b,
    "ZB-H1": schedules.zb_h1,
    "ZB-H2": schedules.zb_h2,
}


@twin
def known(name: str, ranks: int, micro_batches: int, per_rank: int = 1) -> Schedule:
    """Return the table of the library."""
    return (
        schedules.interleaved(ranks, micro_batches, per_rank)
        if name == "interleaved"
        else MAKERS[name](ranks, micro_batches)
    )


def shared(forward: float, input_gradient: float, weight_gradient: float, per_rank: int = 1) -> Costs:
    """Return the costs of one of ``per_rank`` equal stages; the given costs are of all layers of a rank."""
    return Costs(forward / per_rank, input_gradient / per_rank, weight_gradient / per_rank)


def short_1f1b(ranks: int, micro_batches: int, cap: int) -> Schedule:
    """1F1B whose warm-up is cut so that no rank holds more than ``cap`` micro-batches."""
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, cap - 1)
        later = [(Action(F, rank, done + ahead), Action(B, rank, done)) for done in range(micro_batches)]
        row = [Action(F, rank, each) for each in range(ahead)] + [action for pair in later for action in pair]
        rows.append(tuple(action for action in row if action.micro_batch < micro_batches))
    return Schedule("1F1B", in_a_loop(ranks), micro_batches, tuple(rows))


# -- what is drawn


def size(t, most_ranks: int = 5) -> tuple[int, int]:
    """Draw ranks, and more micro-batches than ranks."""
    ranks = t.integer(2, most_ranks)
    return ranks, ranks + t.integer(1, 6)


def many(t) -> tuple[int, int]:
    """Draw more ranks, with many micro-batches."""
    return t.integer(6, 8), t.integer(12, 20)


def groups(t, fewest: int = 2) -> tuple[int, int]:
    """Draw ranks, and a multiple of their number."""
    ranks = t.integer(2, 4)
    return ranks, ranks * t.integer(fewest, fewest + 2)


def three(t) -> tuple[float, float, float]:
    """Draw F, I and W of the layers of a rank, with W the smallest."""
    return t.uniform(0.8, 1.2), t.uniform(1.0, 1.5), t.uniform(0.5, 0.8)


def contest_case(t, ranks: int, micro_batches: int, cap: float) -> dict:
    """Draw a case of the contest: nearly equal parts, with and without a cost of sending."""
    costs = {
        "forward": 1.0,
        "input_gradient": t.uniform(0.95, 1.05),
        "weight_gradient": t.uniform(0.9, 1.0),
        "send": t.choice([0.0, 0.02]),
    }
    return {"ranks": ranks, "micro_batches": micro_batches, "cap": cap, "costs": costs}


@dataclass(frozen=True)
class StartCase:
    """A cell of a simulated table: what has run before it, when its inputs arrive, and when it starts."""

    cell: tuple[str, int, int]
    ended: dict[str, float]
    arrives: dict[str, float]
    free: list[float]
    placement: list[int]
    send: float
    start: float

    @property
    def name(self) -> str:
        kind, stage, i = self.cell
        return f"{stage}{kind}{i}"

    @property
    def with_own_message(self) -> float:
        """When it would start if an input from another stage of the same rank were a message."""
        own = {name: self.send * (Action.parse(name).stage != self.cell[1]) for name in self.arrives}
        return max(
            [
                self.free[self.placement[self.cell[1]]],
                *(self.ended[name] + more for name, more in own.items()),
            ]
        )


def start_cases(t) -> list[StartCase]:
    """Draw cells of a table on a line and of one in a V. In one of them an input comes from another stage of
    the same rank, without a message."""
    return t.draw_until(
        lambda: _drawn_cases(t),
        lambda cases: any(case.with_own_message > case.start + 0.01 for case in cases),
    )


def _drawn_cases(t) -> list[StartCase]:
    """Draw cells of both tables: of the first, an inner and the last stage, each kind."""
    cases = []
    for make in (schedules.zb_h1, schedules.zb_v):
        ranks = t.integer(3, 4)
        table, send = make(ranks, 2 * ranks), t.uniform(0.1, 0.4)
        run = simulate(table, Costs(*three(t), send=send))
        spans = {
            action: span for row, times in zip(table.rows, run.spans) for action, span in zip(row, times)
        }
        turn = 2 * ranks - 1 if make is schedules.zb_v else ranks - 1  # the last stage
        for stage in (0, t.integer(1, turn - 1), turn, *([ranks] if turn > ranks else [])):
            cases += [_start_case(table, spans, (kind, stage, t.integer(0, ranks)), send) for kind in "FIW"]
    return cases


def _start_case(table: Schedule, spans: dict, cell: tuple[str, int, int], send: float) -> StartCase:
    action = next(action for action in spans if (action.kind.value, *action[1:]) == cell)
    start, owner = spans[action][0], table.placement[action.stage]
    row = table.rows[owner]
    before = row[: row.index(action)]
    free = [
        max(
            (
                end
                for each, (begin, end) in spans.items()
                if table.placement[each.stage] == rank and begin < start
            ),
            default=0.0,
        )
        for rank in range(table.ranks)
    ]
    free[owner] = spans[before[-1]][1] if before else 0.0
    kind, stage, i = cell
    needs = {"F": [(F, stage - 1)], "I": [(F, stage), (I, stage + 1)], "W": [(I, stage)]}[kind]
    inputs = [Action(what, source, i) for what, source in needs if 0 <= source < table.stages]
    arrives = {
        str(need): spans[need][1] + (send if table.placement[need.stage] != owner else 0.0) for need in inputs
    }
    ended = {
        str(each): end
        for each, (_, end) in spans.items()
        if each not in row[len(before) :] and (end <= start or each in inputs)
    }
    return StartCase(cell, ended, arrives, free, list(table.placement), send, start)

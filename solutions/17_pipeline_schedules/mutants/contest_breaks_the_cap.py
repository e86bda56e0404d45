"""A cap of one micro-batch is taken for two."""

QUESTION = "contest"
LOSES = 2
FAILS = "check_under_the_cap"
SAYS = "1 is the most allowed. That is the cap"


def contest_rows(ranks: int, micro_batches: int, cap: float, costs: dict[str, float]) -> list[list[str]]:
    """A table with as small a bubble as you can, no rank of which holds more than `cap`."""
    cap = max(cap, 2)
    line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
    candidates = [zb_h1_rows(ranks, micro_batches)]
    candidates += [play_the_clock(placement, ranks, micro_batches, cap, costs) for placement in (line, vee)]
    legal = [rows for rows in candidates if most_held(rows, for_weights=0.5) <= cap]
    return min(legal, key=lambda rows: timed(rows, **costs).bubble_ratio)


def play_the_clock(placement: list[int], ranks: int, micro_batches: int, cap: float, costs: dict[str, float]) -> list[list[str]]:
    """Whoever can begin first does; at equal times I before F before W. A forward must leave room for the rank's later stages."""
    stages, per_rank = len(placement), len(placement) // ranks
    time = {kind: cost / per_rank for kind, cost in zip("FIW", (costs["forward"], costs["input_gradient"], costs["weight_gradient"]))}
    change = {"F": 1 / per_rank, "I": -0.5 / per_rank, "W": -0.5 / per_rank}
    rows, clock, now_held = [[] for _ in range(ranks)], [0.0] * ranks, [0.0] * ranks
    upcoming = {(kind, stage): 0 for kind in "FIW" for stage in range(stages)}
    end = {}

    def begin(kind, stage):
        """When the next action of that kind could begin, None if it cannot."""
        i, rank = upcoming[kind, stage], placement[stage]
        needs = {
            "F": [("F", stage - 1, i)] if stage else [],
            "I": [("F", stage, i)] + ([("I", stage + 1, i)] if stage < stages - 1 else []),
            "W": [("I", stage, i)],
        }[kind]
        later = placement[stage:].count(rank)  # this stage, and those of the rank that come after it
        if i == micro_batches or any(need not in end for need in needs):
            return None
        if kind == "F" and now_held[rank] + later / per_rank > cap:
            return None
        return max([clock[rank], *(end[need] + (costs["send"] if placement[need[1]] != rank else 0.0) for need in needs)])

    for _ in range(3 * stages * micro_batches):
        possible = [(begin(kind, stage), "IFW".index(kind), -stage, kind, stage) for kind, stage in upcoming]
        start, _, _, kind, stage = min(action for action in possible if action[0] is not None)
        rank, i = placement[stage], upcoming[kind, stage]
        upcoming[kind, stage] += 1
        end[kind, stage, i] = clock[rank] = start + time[kind]
        now_held[rank] += change[kind]
        rows[rank].append(f"{stage}{kind}{i}")
    return rows

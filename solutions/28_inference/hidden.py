"""Hidden checks of inference: the visible ideas with other sizes; the answers of the quiz."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import EXACT

from .checks.attention import drawn, pages, step_of
from .checks.memory import drawn_config, largest_is, replayed, stream
from .checks.scheduling import chunks_of, grown, planned_by, state
from .checks.twins import attended, cost, early, planned


@check("cache", points=1)
def check_one_key_head(student, t):
    "One key head for all queries, and a past"
    case = drawn(t, t.integer(4, 8), t.integer(2, 4), kv_heads=1, batch=1)
    t.close(step_of(student, t, case)[0], attended(**case)[0], "the output with one key head", **EXACT)


@check("memory", points=1)
def check_other_config(student, t):
    "The largest batch with one key head"
    config, tokens = drawn_config(t, kv_heads=1), t.integer(50, 900)
    memory = 2 * config["weights"] + t.integer(3, 9) * cost(config, 1, 0, tokens)[2] + t.integer(0, 50)
    largest_is(student, t, config, memory, tokens)


@check("pool", points=1, seconds=20)
def check_everything(student, t):
    "Forks, releases and tokens in random order"
    size, blocks = t.integer(2, 6), t.integer(30, 50)
    replayed(student, t, blocks, size, stream(t, blocks, size, 120, forks=True, releases=True), counted=True)


@check("paged", points=1)
def check_other_pages(student, t):
    "Other sizes of blocks"
    case, want = pages(t)
    t.close(student.paged_attention(*case.values()), want, "the output", **EXACT)


@check("plan", points=1)
def check_other_states(student, t):
    "Requests that run in other states"

    def draw() -> tuple[list[dict], int, int]:
        size, running = t.integer(3, 5), t.integer(3, 5)
        requests, place = state(t, size, running, 3), t.integer(0, 2)
        need = grown(requests, size)
        free = max(sum(need[: running + 1]) - need[place] - requests[place]["blocks"], 0)
        requests[place]["output"][-1] = 99
        return requests, free, size

    for _ in range(3):  # states in which the new token's place matters
        requests, free, size = t.draw_until(draw, lambda case: bool(early(*case, 99)))
        got, want = planned_by(student, t, requests, free, size, 9, 99), planned(requests, free, size, 9, 99)
        t.that(sorted(got["run"]) == sorted(want["run"]), "in another state other requests should run")


@check("chunks", points=1)
def check_small_budget(student, t):
    "A budget that only decoding needs"
    requests = [{"id": name, "prompt": 5, "done": 5} for name in range(t.integer(3, 6))]
    requests.insert(t.integer(0, 2), {"id": 50, "prompt": t.integer(5, 9), "done": 0})
    got = chunks_of(student, t, requests, len(requests) - 1)
    want = [int(each["done"] == each["prompt"]) for each in requests]
    t.that(got == want, "the whole budget is for the requests that decode")


# -- quiz

ANSWERS = {
    "q1": Answer("b", "decoding is limited by the bytes that it reads, and the weights are read once"),
    "q2": Answer("d", "the first to write gets a copy; then the other one is the only owner of the sixth"),
    "q3": Answer("a", "acceptance and residual add up to p whatever q is; only the number of calls grows"),
    "q4": Answer("c", "no iteration has more tokens than the budget, so that none takes long"),
}

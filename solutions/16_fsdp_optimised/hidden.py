"""The hidden checks: cases of other kinds, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.contract import Kind, check
from dlo_lib.grading.quiz import Answer, quiz_right

from .checks import QUIZ, best_by_trying, chosen, compiled, cost, counts, read_plan, sweep_case, timed_blocks, whole_after_each
from .on_ranks import MIB, checkpoint_case, in_order, offload_case, same_inputs, same_mean, same_weights
from .scenarios import carried_out_at_size
from .twins import ahead_of_time, by_the_clock, followed, large_stack, least_time, whole_between


@check("plan", points=1)
def check_kept_whole(student, t):
    "Without resharding every unit is gathered once"
    units = t.integer(3, 8)
    table = read_plan(student, t, units, reshard=False)
    gathers = sorted(k for kind, k in table if kind == "gather")
    t.that(gathers == list(range(units)), "With reshard=False a unit is gathered once and stays whole until its backward is over.")
    t.that(not whole_after_each(table)[-1], "With reshard=False, too, every unit is free at the end.")


@check("plan", points=1)
def check_no_gather_too_many(student, t):
    "Backward begins with the unit that is whole already"
    units = t.integer(3, 8)
    gathers = sum(kind == "gather" for kind, _ in read_plan(student, t, units))
    t.that(gathers <= 2 * units - 1, "The last unit of forward is the first of backward: it need not be gathered again.")


@check("policy", points=2)
def check_few_units(student, t):
    "One unit, and two"
    for units in ([t.integer(1, 10**6)], [t.integer(1, 10**6), t.integer(1, 10**6)]):
        for keep in (8, 1):
            got, want = cost(student, t, units, 8, keep), followed(units, 8, keep)
            good = all(abs(mine - right) <= 1e-6 * right + 1e-6 for mine, right in zip(got, want))
            t.that(bool(good), "With one or two units peak or bytes are not right: the last unit is never gathered again.")


@check("wrapping", points=1, seconds=20)
def check_slow_start(student, t):
    "Messages that are slow to start, and room for everything"
    blocks, alpha, beta = timed_blocks(t, t.integer(1, 6), 0.5)
    alpha, limit = 100 * alpha, sum(size for size, _ in blocks)
    got = by_the_clock(chosen(student, t, blocks, limit, alpha, beta), alpha, beta)
    good = got <= least_time(blocks, limit, alpha, beta) * (1 + 1e-6)
    t.that(bool(good), "Where a message is slow to start and everything fits, there are faster units than yours.")


@check("execute", points=1, seconds=30)
def check_any_table(student, t):
    "Another table, as it is written"
    units = t.integer(3, 5)
    in_order(student, t, whole_between(units), units)


@check("execute", points=1, seconds=40)
def check_memory_of_the_step(student, t):
    "What is freed is gone"
    units, width, world = 8, 720, 2
    case = {"table": ahead_of_time(units), "seed": t.integer(0, 999), "units": units, "width": width}
    run = student.ranks(carried_out_at_size, [case] * world)
    output, sums = large_stack(case["seed"], units, width)
    for got in run.results:
        t.close(got["output"], output, "the output", rtol=1e-3, atol=1e-4)
    for k, want in enumerate(sums):
        parts = [t.number(t.items(got["sums"], units, "the gradients")[k], "a sum") for got in run.results]
        t.close(sum(parts), want, "the sum of gradient {k}", k=k, rtol=1e-2, atol=1e-2)
    unit = 4 * width * width / MIB
    for rank in range(world):
        held = run.memory(rank, "computing") / MIB  # shards and pieces of gradients are 8 units, two whole, three gradients under way
        t.that(
            bool(held < 15.0 * unit), "While units compute a rank holds weights that were freed, or whole gradients that have been reduced."
        )


@check("checkpoint", points=1, seconds=20)
def check_random_state(student, t):
    "Random numbers go on as if backward had drawn none"
    run, want = same_inputs(student, t, checkpoint_case(t, 0.0, t.integer(1, 3)))
    t.that(bool(torch.equal(run.results[0]["random"], want["random"])), "After backward the random generator is not where it was before.")


@check("checkpoint", points=1, seconds=30)
def check_computed_twice(student, t):
    "Each block is computed twice, no more"
    case = checkpoint_case(t, 0.0, 3)
    run, _ = same_inputs(student, t, case, world=2)
    for rank in range(2):
        good = len(run.calls(rank, Kind.ALL_REDUCE)) == 2 * len(case["weights"])
        t.that(good, "A block is computed once in forward and once in backward; every time more costs as much as a forward.")


@check("offload", points=1, seconds=20)
def check_without_gradient(student, t):
    "A parameter without gradient is left alone"
    same_weights(student, t, offload_case(t, "float32", 4, without=t.integer(0, 2)))


@check("hybrid", points=1, seconds=20)
def check_gradient_stays(student, t):
    "The gradient stays as it is"
    run, case = same_mean(student, t, 2, 2)
    for own, got in zip(case, run.results):
        same = bool(torch.equal(t.tensor(got["gradient"], "gradient"), own["gradient"]))
        t.that(same, "hybrid_mean must leave the gradient that it is given as it is.")


@check("compile", points=1, seconds=40)
def check_asked_again(student, t):
    "The same answer when it is asked again"
    segments = [t.integer(1, 5), t.integer(1, 5)]
    found = counts(student, t, segments, times=10)  # more often than torch.compile compiles one function anew
    known = all(type(one) is list and all(type(number) is int for number in one) for one in found)
    good = known and len(found[0]) == len(segments) and all(one == found[0] for one in found)
    t.that(
        bool(good), "graphs_of must begin from nothing: when a function has been compiled often, it is no longer compiled, and not counted."
    )


@check("compile", points=2, seconds=40)
def check_several_blocks(student, t):
    "Several blocks, each with a computation of its own"
    compiled(student, t, t.shuffled([1, 3, 5]), hooks=False)


@check("sweep", points=2)
def check_does_not_fit(student, t):
    "Runs that do not fit, and none that does"
    runs, limit = sweep_case(t, ("fsdp",)), 1e9 * t.uniform(8.0, 20.0)
    nothing = student.fastest(runs, 1e9)
    t.that(nothing is None, "Where not even one sequence fits, the answer is None.")
    runs["ddp"] = [(1, 1e9 * t.uniform(30.0, 40.0), 0.001), (2, 50e9, 0.0011)]
    got, want = student.fastest(runs, limit), best_by_trying(runs, limit)
    t.that(type(got) in (list, tuple) and tuple(got) == want, "A run of which not even one sequence fits cannot be the fastest.")


# -- quiz

ANSWERS = {
    "q1": Answer("b", "each message hides behind a forward that takes longer; only the first is waited for"),
    "q2": Answer("d", "what is at rest stays sharded; weights are whole from the first forward to the last backward"),
    "q3": Answer("a", "the second forward happens while the unit is whole for its backward"),
    "q4": Answer("c", "shards are divided among the 8 ranks of a node, replicas divide nothing"),
    "q5": Answer("b", "hooks belong around a graph, not into it"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)

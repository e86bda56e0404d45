"""The visible checks of the layer in one process, and of the balance of its loads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.grading.checks.graphs import observed
from dlo_lib.labkit.compare import EXACT, double, each_rank, explaining, near, same, wrong_if
from dlo_lib.labkit.traffic import passes_only, uses_what_arrives

from .scenarios import balanced, biased, computed, learns, limited
from .twins import balance, chosen, output, weights_gradient, within

SINGLE = {"rtol": 1e-6, "atol": 1e-8}  # counts may be converted to float32
TWO_GROUPS = [[0, 2], [1]]


def members_of(groups: Sequence[Sequence[int]], rank: int, world: int) -> list[int]:
    """The ranks of the group of this rank; all of them without groups."""
    return next((list(ranks) for ranks in groups if rank in ranks), list(range(world)))


def part_of(whole: Tensor, members: Sequence[int], rank: int) -> Tensor:
    """The part of ``whole`` of a rank in the group ``members``."""
    return whole.chunk(len(members))[members.index(rank)]


# -- route


def unsorted_case(
    t, tokens: int, hidden: int, size: int, k: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and a router for which the experts of a token, from the largest probability on, are not in the
    order of their numbers."""

    def tells(case: tuple[Tensor, Tensor]) -> bool:
        experts = chosen(*case, k, bias)[0]
        return k == 1 or not torch.equal(experts, experts.sort(1).values)

    return t.draw_until(lambda: (double(t, tokens, hidden), double(t, size, hidden)), tells)


OVER_TOKENS = (
    "each column of the probabilities adds up to 1, so the softmax is over the tokens: take it over the "
    "experts, the last dimension"
)
NO_SOFTMAX = "the probabilities are the products x Wᵀ: their softmax over the experts is missing"
BIAS_INSIDE = "the bias is inside the softmax, and changes the probabilities: add it for the choice only"
NO_BIAS = "the bias does not change the choice: add it to the probabilities before topk"
OTHER_ORDER = (
    "the chosen experts are right, and in another order: the one with the largest probability, plus the "
    "bias if there is one, is the first"
)
NO_SUM = "the weights of a token do not add up to 1: divide them by their sum"
BIAS_IN_WEIGHTS = "the bias is in the weights: it decides the choice only"


def route_case(student, t, k: int, bias: Tensor | None = None, size: int = 6) -> None:
    """Experts, weights and probabilities of random tokens are right."""
    x, router = unsorted_case(t, t.integer(5, 8), 4, size, k, bias)
    experts, weights, probabilities = t.items(student.route(x, router, k, bias), 3, "what route returns")
    want, right, all_of_them = chosen(x, router, k, bias)
    logits, plain = x @ router.T, all_of_them.gather(1, want)
    mistakes, of_weights = {OVER_TOKENS: logits.softmax(0), NO_SOFTMAX: logits}, {NO_SUM: plain}
    if bias is not None:
        mistakes[BIAS_INSIDE] = (logits + bias).softmax(1)
        of_weights[BIAS_IN_WEIGHTS] = F.normalize(plain + bias[want], p=1)
    same(t, probabilities, all_of_them, "the probabilities", mistakes, **EXACT)
    t.tensor(experts, "the experts", shape=want.shape, dtype=torch.int64)
    wrong_if(t, experts, want, {NO_BIAS: chosen(x, router, k)[0]})
    t.that(near(experts, want) or not near(experts.sort(1).values, want.sort(1).values), OTHER_ORDER)
    t.equal(experts.tolist(), want.tolist(), "the chosen experts")
    same(t, weights, right, "the weights", of_weights, **EXACT)


@check("route", points=2)
def check_route(student, t):
    "Probabilities, the chosen experts and their weights"
    for k in (1, 2, 3):
        route_case(student, t, k)


@check("route", points=1)
def check_bias(student, t):
    "The bias decides the choice, and is not in the weights"
    size = t.integer(6, 8)
    route_case(student, t, 2, bias=0.3 * double(t, size), size=size)


@check("route", points=1, seconds=20)
def check_router_learns(student, t):
    "The router has a gradient through the weights"
    (x, router), grad = unsorted_case(t, 5, 3, 4, 2), double(t, 5, 2)
    found = student.run(learns, x=x, weight=router, k=2, grad=grad)
    weights, grads = t.items(found, 2, "what the scenario returns")
    t.tensor(weights, "the weights", shape=grad.shape)
    message = (
        "the weights have no gradient, so the router cannot learn: take them from the probabilities without "
        "detach"
    )
    t.that(grads is not None, message)
    same(t, grads, [weights_gradient(x, router, 2, grad)], "the gradient of the router", **EXACT)


# -- order


def order_case(student, t, tokens: int, size: int, k: int) -> None:
    """The order and the counts of random choices, of which some experts have none."""
    experts = torch.tensor([t.shuffled(list(range(0, size, 2)))[:k] for _ in range(tokens)])
    order, counts = t.items(student.sort_choices(experts, size), 2, "what sort_choices returns")
    flat = experts.flatten().tolist()
    want = torch.tensor([flat.count(one) for one in range(size)])
    message = (
        "counts lacks the last experts, which have no token: it should have {size} entries, see minlength"
    )
    wrong_if(t, counts, want, {message: want[: max(flat) + 1]}, size=size)
    t.tensor(counts, "counts", shape=(size,), dtype=torch.int64)
    t.equal(counts.tolist(), want.tolist(), "the list of the counts")
    t.tensor(order, "order", shape=(len(flat),), dtype=torch.int64)
    message = "order should have each number from 0 to T·k - 1 once: the numbers of the choices"
    t.that(sorted(order.tolist()) == list(range(len(flat))), message)
    message = (
        "order[{place}] is choice {choice}, which is of expert {got}, expected a choice of expert {one}: "
        "number the choices as experts.flatten() does"
    )
    for place, (choice, one) in enumerate(zip(order.tolist(), sorted(flat))):
        t.that(flat[choice] == one, message, place=place, choice=choice, got=flat[choice], one=one)
    stable = order.tolist() == sorted(range(len(flat)), key=lambda choice: flat[choice])
    t.that(stable, "choices of the same expert are not in their order: use a stable sort")


@check("order", points=2)
def check_order(student, t):
    "The order of the choices, and the counts of all experts"
    order_case(student, t, 40, 6, 2)
    order_case(student, t, t.integer(3, 6), 3, 1)


# -- experts


def sorted_rows(t, counts: list[int], hidden: int, inner: int) -> list[Tensor]:
    """Rows, counts and weights of experts, and the right results."""
    rows = double(t, sum(counts), hidden)
    first, second = double(t, len(counts), hidden, inner), double(t, len(counts), inner, hidden)
    owner = [one for one, count in enumerate(counts) for _ in range(count)]
    want = torch.stack([output(row, first[one], second[one]) for row, one in zip(rows, owner)])
    return [rows, torch.tensor(counts), first, second, want]


@check("experts", points=2)
def check_experts(student, t):
    "Each expert computes its rows"
    sizes = [t.integer(1, 3), 0, t.integer(1, 3), *(t.integer(2, 4) for _ in range(t.integer(2, 3)))]
    rows, counts, first, second, want = sorted_rows(t, sizes, t.integer(2, 4), t.integer(3, 5))
    shifted = map(output, rows.split(counts[counts > 0].tolist()), first, second)
    skipped = (
        "the experts after one without rows compute with the weights of others: expert e has first[e] and "
        "second[e], also if it has no rows"
    )
    got = student.run_experts(rows, counts, first, second)
    same(t, got, want, "the result of run_experts", {skipped: torch.cat(list(shifted))}, **EXACT)


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "_grouped_mm"}
OF_NEXT = (
    "the rows of the expert after one without rows are computed with the weights of that one: expert e has "
    "first[e] and second[e]"
)
ALL_ROWS = (
    "an expert without rows has NaN as weights, and NaN is in the result: compute the rows of an expert "
    "only, not all rows with a mask"
)


@check("experts", points=1, seconds=20)
def check_only_own_rows(student, t):
    "An expert computes only its rows, in one product"
    sizes = [t.integer(2, 6), 0, t.integer(4, 7), t.integer(3, 6)]
    hidden, inner = t.integer(2, 3), t.integer(4, 5)
    rows, counts, first, second, want = sorted_rows(t, sizes, hidden, inner)
    found = student.run(computed, rows=rows, counts=counts, first=first, second=second)
    t.that(found is not None, "not tested yet: run_experts returns no tensor, see the first check")
    graph, got = t.items(found, 2, "what the scenario returns")
    t.close(got, want, "the result of run_experts", **EXACT)
    # The recorded operations run again here, on numbers that the answer has not seen.
    rows, counts, first, second, want = sorted_rows(t, sizes, hidden, inner)
    first[1] = second[1] = torch.nan
    outputs, operations = observed(graph, [rows, first, second])
    again = t.tensor(outputs[0] if outputs else None, "the result of run_experts", shape=want.shape)
    nan = torch.isnan(again).any(1).tolist()
    t.that(nan != [sizes[0] <= place < sizes[0] + sizes[2] for place in range(len(want))], OF_NEXT)
    t.that(not any(nan), ALL_ROWS)
    t.close(again, want, "the result of the operations of run_experts on other numbers", **EXACT)
    made = [each.makes for each in operations if each.name in PRODUCTS]
    message = (
        "run_experts makes {count} matrix products for {size} experts: an expert multiplies all its rows at "
        "once, once by `first` and once by `second`"
    )
    t.that(len(made) <= 2 * len(sizes), message, count=len(made), size=len(sizes))
    most = len(rows) * (hidden + inner)
    message = (
        "the matrix products of run_experts have results of {got} numbers, expected at most {most}: compute "
        "the rows of an expert only, not all rows with a mask"
    )
    t.that(sum(made) <= most, message, got=sum(made), most=most)
    largest = max(each.makes for each in operations)
    message = (
        "run_experts makes a tensor of {largest} numbers, more than the weights of all experts have: give "
        "each expert its rows, and not each row a copy of the weights"
    )
    t.that(largest <= max(first.numel(), len(rows) * inner), message, largest=largest)


FEWER_ROWS = "R may be less than T·k, because a dropped choice has no row: "
TOO_FEW = {
    "is invalid for input of size": FEWER_ROWS + "add each row to its token, without a view (T, k, h)",
    "must match the size of tensor": FEWER_ROWS + "row i has the weight of choice order[i]",
}
UNSORTED = (
    "the weights are in the order of the choices, and the rows are sorted: row i has the weight of choice "
    "order[i]"
)
OTHER_TOKEN = "a row is added to the wrong token: choice c belongs to token c // k, not to c % T"
UNWEIGHTED = "combine adds the rows without their weights"
OVERWRITTEN = (
    "a token has only one of its rows: out[tokens] += rows adds one row for each token. Use index_add"
)


@check("experts", points=2)
def check_combine(student, t):
    "Each token has the weighted sum of its rows, and dropped choices add nothing"
    tokens, k = t.integer(4, 6), 2
    weights = t.uniform(0.1, 1.0) + 0.1 * double(t, tokens, k).abs()
    for kept in (tokens * k, tokens * k - 3):
        order = torch.tensor(t.shuffled(list(range(tokens * k)))[:kept])
        rows = double(t, kept, 3)
        want, plain, overwritten, unsorted, other = (rows.new_zeros(tokens, 3) for _ in range(5))
        for place, (row, choice) in enumerate(zip(rows, order.tolist())):
            weighted = weights[choice // k, choice % k] * row
            want[choice // k] += weighted
            plain[choice // k] += row
            overwritten[choice // k] = weighted
            unsorted[choice // k] += weights[place // k, place % k] * row
            other[choice % tokens] += weighted
        mistakes = {UNSORTED: unsorted, OTHER_TOKEN: other, UNWEIGHTED: plain, OVERWRITTEN: overwritten}
        with explaining(TOO_FEW):
            got = student.combine(rows, order, weights)
        same(t, got, want, "the result of combine", mistakes, **EXACT)


# -- capacity

CALLED = "capacity_of({factor}, {tokens}, {k}, {size}) is {got}"
ROUNDED_DOWN = CALLED + ": round up, or with factor 1 even equal loads lose rows"
OF_TOKENS = CALLED + ", the share of {tokens} rows: T tokens have T·k choices"


@check("capacity", points=1)
def check_capacity_of(student, t):
    "The capacity is rounded up"
    for tokens, k, size in ((t.integer(10, 99), 2, 8), (t.integer(10, 99), 1, 7), (16, 2, 4)):
        for factor in (1.0, 1.25, 2.0):
            got = student.capacity_of(factor, tokens, k, size)
            want, of_tokens = (
                next(rows for rows in range(2 * number + 99) if rows * size >= factor * number)
                for number in (tokens * k, tokens)
            )
            values = {"factor": factor, "tokens": tokens, "k": k, "size": size, "got": got}
            wrong_if(t, got, want, {ROUNDED_DOWN: want - 1, OF_TOKENS: of_tokens}, **values)
            t.that(type(got) is int and got == want, CALLED + ", expected {want}", want=want, **values)


def capacity_case(student, t, capacities: Sequence[int], tokens: int = 9, size: int = 4) -> None:
    """The order and the counts within each of the capacities, with arguments that stay unchanged."""
    cases, wants = [], []
    for capacity in capacities:
        experts = torch.tensor([[t.choice([0, 0, *range(size)]), size - 1] for _ in range(tokens)])
        order = experts.flatten().sort(stable=True).indices
        cases.append([order, experts.flatten().bincount(minlength=size), capacity])
        wants.append(order[within(experts, size, capacity).flatten()[order]])
    found = t.items(student.run(limited, cases=cases), len(cases), "the results")
    for (order, counts, capacity), want, got in zip(cases, wants, found):
        result, old_order, old_counts = t.items(got, 3, "what the scenario returns")
        new_order, new_counts = t.items(result, 2, "what keep_within returns")
        mistakes = {
            "nothing is dropped, but an expert has more rows than its capacity of {capacity}": order,
            "experts keep their last rows: they keep the first ones, and drop the rest": torch.cat(
                [own[-capacity:] for own in order.split(counts.tolist())]
            ),
            "the end of the order is cut off, so the last experts lose rows: each expert has its own "
            "limit": order[: len(want)],
        }
        wrong_if(t, new_order, want, mistakes, capacity=capacity)
        t.equal(new_order, want, "the order of the rows that are kept")
        t.equal(new_counts, counts.clamp(max=capacity), "the counts of the rows that are kept")
        message = "keep_within changes its arguments: return new tensors, as by clamp and not by clamp_"
        t.that(near([old_order, old_counts], [order, counts]), message)


@check("capacity", points=2, seconds=20)
def check_capacity(student, t):
    "Each expert keeps its first rows, up to the capacity"
    capacity_case(student, t, t.shuffled([1, 2, 4]))


# -- balance

SHARES_OF_ALL = (
    "the shares on rank {rank} are those of all ranks, not of its group: give group=group to the all-reduce"
)
SHARES_ALONE = "the shares on rank {rank} are those of this rank alone: add the counts of all ranks first"
SHARES_ADDED = (
    "the shares on rank {rank} add up to {members}, not to 1: divide the counts of all ranks by the choices "
    "of all ranks"
)
TOO_SMALL = (
    "the gradient on rank {rank} is too small: E times the sum, and P is the mean over the tokens of this "
    "rank"
)
NOT_TIMES_E = "the loss on rank {rank} is not multiplied by the number of experts"


def balance_case(student, t, world: int, groups: Sequence[Sequence[int]]) -> Run:
    """The balance loss of each group of ranks, with results that are right; all of 4 experts."""
    tokens, members = t.integer(5, 8), [members_of(groups, rank, world) for rank in range(world)]

    def draw() -> tuple[list[Tensor], list[Tensor]]:
        logits = [double(t, tokens, 4) + 2 * double(t, 1, 4) for _ in range(world)]
        probabilities = [each.softmax(-1) for each in logits]
        return probabilities, [each.topk(2, -1).indices for each in probabilities]

    def loads(experts: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
        return torch.cat([experts[rank].flatten() for rank in ranks]).bincount(minlength=4) / len(ranks)

    def tells(drawn: tuple[list[Tensor], list[Tensor]]) -> bool:
        """Whether the shares of a group are neither those of one of its ranks nor those of all ranks."""
        parts = [(own, other) for rank, own in enumerate(members) for other in ([rank], range(world))]
        known = [pair for pair in parts if len(pair[0]) != len(pair[1])]
        return not any(torch.equal(loads(drawn[1], own), loads(drawn[1], other)) for own, other in known)

    def balance_of(ranks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        return balance([probabilities[rank] for rank in ranks], [experts[rank] for rank in ranks])

    probabilities, experts = t.draw_until(draw, tells)
    inputs = [{"probabilities": p, "experts": e, "groups": groups} for p, e in zip(probabilities, experts)]
    run = student.ranks(balanced, inputs)
    losses: list[Tensor] = []
    for rank, (value, grads) in each_rank(t, run, 2, "what the scenario returns"):
        own = members[rank]
        right = balance_of(own)[1][own.index(rank)]
        losses.append(t.tensor(value, "what balance_loss returns", shape=()))
        message = "the loss has no gradient on rank {rank}: it passes through the probabilities"
        t.that(grads is not None, message, rank=rank)
        mistakes = {
            SHARES_OF_ALL: balance_of(range(world))[1][rank],
            SHARES_ALONE: balance_of([rank])[1][0],
            SHARES_ADDED: right * len(own),
            TOO_SMALL: right / len(own),
            NOT_TIMES_E: right / 4,
        }
        where, what = {"rank": rank, "world": world, "members": len(own)}, "the gradient of the probabilities"
        wrong = {message: [value] for message, value in mistakes.items()}
        same(t, grads, [right], what + " on rank {rank} of {world}", wrong, **where, **SINGLE)
    for own in members:
        mean = sum(losses[rank] for rank in own) / len(own)
        t.close(mean, balance_of(own)[0], "the mean of the losses of the ranks of a group", **SINGLE)
    return run


@check("balance", points=2, seconds=20)
def check_balance_loss(student, t):
    "The mean of the losses is the loss of the whole batch of the group"
    balance_case(student, t, 3, TWO_GROUPS)


@check("balance", points=1, seconds=20)
def check_balance_traffic(student, t):
    "One all-reduce of the counts"
    run = balance_case(student, t, 2, [])
    message = "rank {rank} uses {kinds}: an all-reduce of the counts is enough"
    passes_only(t, run, [Kind.ALL_REDUCE], message)
    message = (
        "rank {rank} makes {count} all-reduces of {numbers} numbers together: one of 4, the counts, in "
        "forward is enough"
    )
    for rank in range(run.world):
        calls = run.calls(rank)
        good = [(call.numel, call.in_backward) for call in calls] == [(4, False)]
        t.that(good, message, rank=rank, count=len(calls), numbers=sum(call.numel for call in calls))
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 1))


BIAS_OF_ALL = (
    "the bias on rank {rank} depends on the counts of all ranks, not of its group: give group=group to the "
    "all-reduce"
)
BIAS_ALONE = (
    "the bias on rank {rank} depends on the counts of this rank only, so the ranks choose differently: add "
    "the counts of all ranks"
)
PROPORTIONAL = "the step on rank {rank} is proportional to the load: only its sign counts"
FALLS = "the bias falls for idle experts on rank {rank}: it should rise"


def idle(counts: Tensor) -> Tensor:
    """How far each load is below the mean."""
    return counts.double().mean() - counts.double()


def signs_differ(counts: Sequence[Tensor]) -> bool:
    """Whether the signs of ranks 0 and 2 together are those of neither rank alone, nor of all three, and
    those of rank 1 are not those of all."""
    sums = counts[0] + counts[2], counts[0], counts[2], sum(counts), counts[1]
    together, *alone, of_one = [idle(each).sign().tolist() for each in sums]
    return together not in alone and of_one != alone[-1]


@check("balance", points=2, seconds=20)
def check_update_bias(student, t):
    "The bias rises for idle experts, on all ranks of the group alike"
    size = t.integer(3, 6)
    bias, rate = double(t, size), t.uniform(0.01, 0.1)
    counts = t.draw_until(lambda: [t.integers(0, 30, size) for _ in range(3)], signs_differ)
    fixed = {"bias": bias, "rate": rate, "groups": TWO_GROUPS}
    run = student.ranks(biased, [{"counts": own, **fixed} for own in counts])
    for rank, (new, *after) in each_rank(t, run, 3, "what the scenario returns"):
        load = idle(sum(counts[other] for other in members_of(TWO_GROUPS, rank, 3)))
        mistakes = {
            FALLS: bias - rate * load.sign(),
            BIAS_OF_ALL: bias + rate * idle(sum(counts)).sign(),
            BIAS_ALONE: bias + rate * idle(counts[rank]).sign(),
            PROPORTIONAL: bias + rate * load,
        }
        same(t, new, bias + rate * load.sign(), "the bias on rank {rank}", mistakes, rank=rank, **SINGLE)
        message = (
            "update_bias changes its arguments on rank {rank}: give all_reduce a clone, it works in place"
        )
        t.that(near(after, [bias, counts[rank]]), message, rank=rank)

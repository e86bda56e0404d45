"""The visible checks of the layer in one process, and of the balance of its loads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, check
from dlo_lib.grading.checks.graphs import observed
from dlo_lib.labkit.compare import explaining, wrong_if
from dlo_lib.labkit.traffic import kinds_of, uses_what_arrives

from .scenarios import balanced, biased, computed, learns, limited
from .twins import balance, chosen, weights_gradient, within

DOUBLE = torch.float64
EXACT = {"rtol": 1e-9, "atol": 1e-10}
SINGLE = {"rtol": 1e-6, "atol": 1e-8}  # counts may be converted to float32
TWO_GROUPS = [[0, 2], [1]]


def members_of(groups: Sequence[Sequence[int]], rank: int, world: int) -> list[int]:
    """The ranks of the group of this rank; all of them without groups."""
    return next((list(ranks) for ranks in groups if rank in ranks), list(range(world)))


def double(t, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return t.normal(*shape, dtype=DOUBLE)


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


def route_case(student, t, k: int, bias: Tensor | None = None, size: int = 6) -> None:
    """Experts, weights and probabilities of random tokens are right."""
    x, router = unsorted_case(t, t.integer(5, 8), 4, size, k, bias)
    experts, weights, probabilities = t.items(student.route(x, router, k, bias), 3, "what route returns")
    want, right, all_of_them = chosen(x, router, k, bias)
    logits = x @ router.T
    over_tokens = (
        "each column of the probabilities adds up to 1, so the softmax is over the tokens: take it over the "
        "experts, the last dimension"
    )
    missing = "the probabilities are the products x Wᵀ: their softmax over the experts is missing"
    mistakes = {over_tokens: torch.softmax(logits, 0), missing: logits}
    if bias is not None:
        inside = "the bias is inside the softmax, and changes the probabilities: add it for the choice only"
        mistakes |= {inside: torch.softmax(logits + bias, 1)}
    wrong_if(t, probabilities, all_of_them, mistakes)
    t.close(probabilities, all_of_them, "the probabilities", **EXACT)
    shape = list(experts.shape) if type(experts) is Tensor else experts
    message = "the experts have the shape {shape}, expected {want}"
    t.that(shape == list(want.shape), message, shape=shape, want=list(want.shape))
    t.that(experts.dtype == torch.int64, "the experts should be int64, the numbers of experts")
    without = chosen(x, router, k)[0]
    ignored = bool(torch.equal(experts, without)) and not bool(torch.equal(want, without))
    t.that(not ignored, "the bias does not change the choice: add it to the probabilities before topk")
    same_set = bool(torch.equal(experts.sort(1).values, want.sort(1).values))
    others = same_set and not bool(torch.equal(experts, want))
    message = (
        "the chosen experts are right, and in another order: the one with the largest probability, plus the "
        "bias if there is one, is the first"
    )
    t.that(not others, message)
    t.equal(experts.tolist(), want.tolist(), "the chosen experts")
    plain = all_of_them.gather(1, want)
    mistakes = {"the weights of a token do not add up to 1: divide them by their sum": plain}
    if bias is not None:
        scores = plain + bias[want]
        mistakes["the bias is in the weights: it decides the choice only"] = scores / scores.sum(
            1, keepdim=True
        )
    wrong_if(t, weights, right, mistakes)
    t.close(weights, right, "the weights", **EXACT)


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
    (got,) = student.ranks(learns, [{"x": x, "weight": router, "k": 2, "grad": grad}]).results
    t.that(
        got is not None,
        "the weights have no gradient, so the router cannot learn: take them from the probabilities without "
        "detach",
    )
    t.close(got, weights_gradient(x, router, 2, grad), "the gradient of the router", **EXACT)


# -- order


def order_case(student, t, tokens: int, size: int, k: int) -> None:
    """The order and the counts of random choices, of which some experts have none."""
    experts = torch.tensor([t.shuffled(list(range(0, size, 2)))[:k] for _ in range(tokens)])
    order, counts = t.items(student.sort_choices(experts, size), 2, "what sort_choices returns")
    flat = experts.flatten().tolist()
    want = [flat.count(one) for one in range(size)]
    is_list = type(counts) is Tensor and counts.dim() == 1
    short = is_list and counts.tolist() == want[: max(flat) + 1] != want
    message = (
        "counts lacks the last experts, which have no token: it should have {size} entries, see minlength"
    )
    t.that(not short, message, size=size)
    t.tensor(counts, "counts", shape=(size,), dtype=torch.int64)
    t.equal(counts.tolist(), want, "the list of the counts")
    right = [place for one in range(size) for place, each in enumerate(flat) if each == one]
    known = type(order) is Tensor and order.dtype == torch.int64
    known = known and sorted(order.flatten().tolist()) == list(range(len(flat)))
    message = "order should have each number from 0 to T·k - 1 once, as int64: the numbers of the choices"
    t.that(known, message)
    for place, (choice, one) in enumerate(zip(order.flatten().tolist(), sorted(flat))):
        message = (
            "order[{place}] is choice {choice}, which is of expert {got}, expected a choice of expert "
            "{one}: number the choices as experts.flatten() does"
        )
        t.that(flat[choice] == one, message, place=place, choice=choice, got=flat[choice], one=one)
    by_expert = [flat[place] for place in order.flatten().tolist()] == sorted(flat)
    message = "choices of the same expert are not in their order: use a stable sort"
    t.that(order.tolist() == right or not by_expert, message)
    t.equal(order, torch.tensor(right), "the order")


@check("order", points=2)
def check_order(student, t):
    "The order of the choices, and the counts of all experts"
    order_case(student, t, 40, 6, 2)
    order_case(student, t, t.integer(3, 6), 3, 1)


# -- experts


def sorted_rows(
    t, counts: list[int], hidden: int, inner: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, counts and weights of experts, and the right results."""
    rows = double(t, sum(counts), hidden)
    first, second = double(t, len(counts), hidden, inner), double(t, len(counts), inner, hidden)
    owner = [one for one, count in enumerate(counts) for _ in range(count)]
    products = [row @ first[one] for row, one in zip(rows, owner)]
    inside = [product * torch.sigmoid(product) for product in products]
    want = torch.stack([row @ second[one] for row, one in zip(inside, owner)])
    return rows, torch.tensor(counts), first, second, want


@check("experts", points=2)
def check_experts(student, t):
    "Each expert computes its rows"
    sizes = [t.integer(1, 3), 0, t.integer(1, 3), *(t.integer(2, 4) for _ in range(t.integer(2, 3)))]
    rows, counts, first, second, want = sorted_rows(t, sizes, t.integer(2, 4), t.integer(3, 5))
    got = student.run_experts(rows, counts, first, second)
    # Without the expert that has no rows, the next ones would get the weights of others.
    own = counts[counts > 0].tolist()
    shifted = [F.silu(part @ first[one]) @ second[one] for one, part in enumerate(rows.split(own))]
    skipped = (
        "the experts after one without rows compute with the weights of others: expert e has first[e] and "
        "second[e], also if it has no rows"
    )
    wrong_if(t, got, want, {skipped: torch.cat(shifted)})
    t.close(got, want, "the result of run_experts", **EXACT)


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "_grouped_mm"}


@check("experts", points=1, seconds=20)
def check_only_own_rows(student, t):
    "An expert computes only its rows, in one product"
    sizes = [t.integer(2, 6), 0, t.integer(4, 7), t.integer(3, 6)]
    hidden, inner = t.integer(2, 3), t.integer(4, 5)
    rows, counts, first, second, want = sorted_rows(t, sizes, hidden, inner)
    inputs = {"rows": rows, "counts": counts, "first": first, "second": second}
    found = student.run(computed, **inputs)
    t.that(found is not None, "not tested yet: run_experts returns no tensor, see the first check")
    graph, got = t.items(found, 2, "what the scenario returns")
    t.close(got, want, "the result of run_experts", **EXACT)
    # The recorded operations run again here, on numbers that the answer has not seen.
    rows, counts, first, second, want = sorted_rows(t, sizes, hidden, inner)
    first[1] = second[1] = torch.nan
    outputs, operations = observed(graph, [rows, first, second])
    again = t.tensor(outputs[0] if outputs else None, "the result of run_experts", shape=want.shape)
    nan = torch.isnan(again).any(1).tolist()
    of_next = nan == [sizes[0] <= place < sizes[0] + sizes[2] for place in range(len(want))]
    message = (
        "the rows of the expert after one without rows are computed with the weights of that one: expert e "
        "has first[e] and second[e]"
    )
    t.that(not of_next, message)
    message = (
        "an expert without rows has NaN as weights, and NaN is in the result: compute the rows of an expert "
        "only, not all rows with a mask"
    )
    t.that(not any(nan), message)
    t.close(again, want, "the result of the operations of run_experts on other numbers", **EXACT)
    made = [each.makes for each in operations if each.name in PRODUCTS]
    message = (
        "run_experts makes {count} matrix products for {size} experts: an expert multiplies all its rows at "
        "once, once by `first` and once by `second`"
    )
    t.that(len(made) <= 2 * len(sizes), message, count=len(made), size=len(sizes))
    most = len(rows) * (first.shape[1] + first.shape[2])
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
    t.that(largest <= max(first.numel(), len(rows) * first.shape[2]), message, largest=largest)


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
    weights = t.uniform(0.1, 1.0) * torch.ones(tokens, k, dtype=DOUBLE) + 0.1 * double(t, tokens, k).abs()
    for kept in (tokens * k, tokens * k - 3):
        order = torch.tensor(t.shuffled(list(range(tokens * k)))[:kept])
        rows = double(t, kept, 3)
        want, plain = torch.zeros(tokens, 3, dtype=DOUBLE), torch.zeros(tokens, 3, dtype=DOUBLE)
        overwritten, unsorted, other = (torch.zeros(tokens, 3, dtype=DOUBLE) for _ in range(3))
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
        wrong_if(t, got, want, mistakes)
        t.close(got, want, "the result of combine", **EXACT)


# -- capacity


@check("capacity", points=1)
def check_capacity_of(student, t):
    "The capacity is rounded up"
    for tokens, k, size in ((t.integer(10, 99), 2, 8), (t.integer(10, 99), 1, 7), (16, 2, 4)):
        for factor in (1.0, 1.25, 2.0):
            got = student.capacity_of(factor, tokens, k, size)
            want = next(rows for rows in range(tokens * k + 99) if rows * size >= factor * tokens * k)
            values = {"factor": factor, "tokens": tokens, "k": k, "size": size, "got": got, "want": want}
            down = type(got) is int and got == want - 1
            message = (
                "capacity_of({factor}, {tokens}, {k}, {size}) is {got}: round up, or with factor 1 even "
                "equal loads lose rows"
            )
            t.that(not down, message, **values)
            alone = next(rows for rows in range(tokens + 99) if rows * size >= factor * tokens)
            message = (
                "capacity_of({factor}, {tokens}, {k}, {size}) is {got}, the share of {tokens} rows: T "
                "tokens have T·k choices"
            )
            t.that(got != alone or alone == want, message, **values)
            message = "capacity_of({factor}, {tokens}, {k}, {size}) is {got}, expected {want}"
            t.that(type(got) is int and got == want, message, **values)


def capacity_case(student, t, capacities: Sequence[int], tokens: int = 9, size: int = 4) -> None:
    """The order and the counts within each of the capacities, with arguments that stay unchanged."""
    cases = []
    for capacity in capacities:
        experts = torch.tensor([[t.choice([0, 0, *range(size)]), size - 1] for _ in range(tokens)])
        flat = experts.flatten()
        order = flat.sort(stable=True).indices
        counts = torch.tensor([int((flat == one).sum()) for one in range(size)])
        cases.append((order, counts, capacity, experts))
    (found,) = student.ranks(limited, [{"cases": [list(case[:3]) for case in cases]}]).results
    for (order, counts, capacity, experts), got in zip(cases, t.items(found, len(cases), "the results")):
        result, old_order, old_counts = t.items(got, 3, "what the scenario returns")
        right_capacity(t, result, order, counts, capacity, experts, size)
        unchanged = bool(torch.equal(old_order, order)) and bool(torch.equal(old_counts, counts))
        message = "keep_within changes its arguments: return new tensors, as by clamp and not by clamp_"
        t.that(unchanged, message)


def right_capacity(
    t, result: object, order: Tensor, counts: Tensor, capacity: int, experts: Tensor, size: int
) -> None:
    """What ``keep_within`` returns is right."""
    flat = experts.flatten()
    new_order, new_counts = t.items(result, 2, "what keep_within returns")
    kept = within(experts, size, capacity).flatten()
    want = torch.tensor([place for place in order.tolist() if kept[place]])
    if capacity < len(experts):
        same = type(new_order) is Tensor and bool(torch.equal(new_order, order))
        message = "nothing is dropped, but an expert has more rows than its capacity of {capacity}"
        t.that(not same, message, capacity=capacity)
    of_experts = [[each for each in order.tolist() if flat[each] == one] for one in range(size)]
    last = [place for own in of_experts for place in own[-capacity:]]
    got = new_order.flatten().tolist() if type(new_order) is Tensor else None
    message = "experts keep their last rows: they keep the first ones, and drop the rest"
    t.that(got == want.tolist() or got != last, message)
    cut = order[: len(want)].tolist()
    message = "the end of the order is cut off, so the last experts lose rows: each expert has its own limit"
    t.that(got == want.tolist() or got != cut, message)
    t.equal(new_order, want, "the order of the rows that are kept")
    t.equal(new_counts, counts.clamp(max=capacity), "the counts of the rows that are kept")


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


def balance_case(student, t, world: int, groups: Sequence[Sequence[int]] = ()):
    """The balance loss of each group of ranks, with results that are right."""
    tokens, size = t.integer(5, 8), 4
    # Until the shares of a group are neither those of one of its ranks nor those of all ranks.
    for _ in range(20):
        logits = [double(t, tokens, size) + 2 * double(t, 1, size) for _ in range(world)]
        probabilities = [each.softmax(-1) for each in logits]
        experts = [each.topk(2, -1).indices for each in probabilities]
        counts = [each.flatten().bincount(minlength=size).double() for each in experts]
        pairs = []
        for members in groups or [range(world)]:
            mean = sum(counts[rank] for rank in members) / len(members)
            pairs += [(mean, counts[rank]) for rank in members if len(members) > 1]
            pairs += [(mean, sum(counts) / world)] * (len(members) < world)
        if not any(bool(torch.equal(*pair)) for pair in pairs):
            break
    fixed = {"groups": [list(own) for own in groups]}
    inputs = [{"probabilities": p, "experts": e, **fixed} for p, e in zip(probabilities, experts)]
    run = student.ranks(balanced, inputs)
    _, of_everyone = balance(probabilities, experts)
    losses: list[Tensor] = []
    for rank, got in enumerate(run.results):
        members = members_of(groups, rank, world)
        _, grads = balance([probabilities[other] for other in members], [experts[other] for other in members])
        right = grads[members.index(rank)]
        value, grad = t.items(got, 2, "what the loss returns")
        t.that(type(value) is Tensor and value.dim() == 0, "balance_loss should return a scalar tensor")
        message = "the loss has no gradient on rank {rank}: it passes through the probabilities"
        t.that(grad is not None, message, rank=rank)
        alone = balance([probabilities[rank]], [experts[rank]])[1][0]
        mistakes = {
            SHARES_OF_ALL: of_everyone[rank],
            SHARES_ALONE: alone,
            SHARES_ADDED: right * len(members),
            TOO_SMALL: right / len(members),
            "the loss on rank {rank} is not multiplied by the number of experts": right / size,
        }
        wrong_if(t, grad, right, mistakes, rank=rank, members=len(members))
        what = "the gradient of the probabilities on rank {rank} of {world}"
        t.close(grad, right, what, rank=rank, world=world, **SINGLE)
        losses.append(value)
    for members in groups or [list(range(world))]:
        loss, _ = balance([probabilities[rank] for rank in members], [experts[rank] for rank in members])
        mean = sum(losses[rank] for rank in members) / len(members)
        t.close(mean, loss, "the mean of the losses of the ranks of a group", **SINGLE)
    return run, size


@check("balance", points=2, seconds=20)
def check_balance_loss(student, t):
    "The mean of the losses is the loss of the whole batch of the group"
    balance_case(student, t, 3, TWO_GROUPS)


@check("balance", points=1, seconds=20)
def check_balance_traffic(student, t):
    "One all-reduce of the counts"
    run, size = balance_case(student, t, 2)
    for rank in range(run.world):
        others = kinds_of(run, rank, [Kind.ALL_REDUCE])
        message = "rank {rank} uses {kinds}: an all-reduce of the counts is enough"
        t.that(not others, message, rank=rank, kinds=others)
        calls = run.calls(rank, Kind.ALL_REDUCE)
        good = len(calls) == 1 and calls[0].numel == size and not calls[0].in_backward
        numbers = sum(call.numel for call in calls)
        message = (
            "rank {rank} makes {count} all-reduces of {numbers} numbers together: one of {size}, the "
            "counts, in forward is enough"
        )
        t.that(good, message, rank=rank, count=len(calls), numbers=numbers, size=size)
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


def signs_differ(counts: Sequence[Tensor]) -> bool:
    """Whether the signs of ranks 0 and 2 together are those of neither rank alone, nor of all three, and
    those of rank 1 are not those of all."""
    signs = [
        torch.sign(each.double().mean() - each.double()).tolist()
        for each in (counts[0] + counts[2], counts[0], counts[2], sum(counts), counts[1])
    ]
    together, everyone = signs[0], signs[3]
    return together not in signs[1:4] and signs[4] != everyone


@check("balance", points=2, seconds=20)
def check_update_bias(student, t):
    "The bias rises for idle experts, on all ranks of the group alike"
    size = t.integer(3, 6)
    bias, rate = double(t, size), t.uniform(0.01, 0.1)
    counts = t.draw_until(lambda: [t.integers(0, 30, size) for _ in range(3)], signs_differ)
    fixed = {"bias": bias, "rate": rate, "groups": TWO_GROUPS}
    run = student.ranks(biased, [{"counts": own, **fixed} for own in counts])
    for rank, got in enumerate(run.results):
        new, old, same = t.items(got, 3, "what the scenario returns")
        total = sum(counts[other] for other in members_of(TWO_GROUPS, rank, 3)).double()
        alone, everyone = counts[rank].double(), sum(counts).double()
        steps = torch.tensor(
            [float(size * each < total.sum()) - float(size * each > total.sum()) for each in total]
        )
        steps, idle = steps.to(DOUBLE), "the bias falls for idle experts on rank {rank}: it should rise"
        want = bias + rate * steps
        mistakes = {
            idle: bias - rate * steps,
            BIAS_OF_ALL: bias + rate * torch.sign(everyone.mean() - everyone),
            BIAS_ALONE: bias + rate * torch.sign(alone.mean() - alone),
            PROPORTIONAL: bias + rate * (total.mean() - total),
        }
        wrong_if(t, new, want, mistakes, rank=rank)
        t.close(new, want, "the bias on rank {rank}", rank=rank, **SINGLE)
        unchanged = bool(torch.equal(old, bias)) and bool(torch.equal(same, counts[rank]))
        message = (
            "update_bias changes its arguments on rank {rank}: give all_reduce a clone, it works in place"
        )
        t.that(unchanged, message, rank=rank)

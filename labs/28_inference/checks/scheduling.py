"""The visible checks of the plan of an iteration, and of chunked prefill."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check

from .twins import blocks_of, early, planned

# -- plan

EOS = 0


def request(t, name: int, size: int, running: bool, output: int, limit: int) -> dict:
    """A request that has written ``output`` tokens, none of which ends it."""
    prompt, tokens = t.integer(2, 9), [t.integer(1, 50) for _ in range(output)]
    blocks = blocks_of(prompt + max(output - 1, 0), size) if running else 0
    return {"id": name, "prompt": prompt, "output": tokens, "limit": limit, "blocks": blocks}


def names(t, count: int) -> list[int]:
    return t.shuffled(range(100, 100 + 3 * count))[:count]


def state(t, size: int, running: int, waiting: int) -> list[dict]:
    """Requests in the order of their arrival: running ones, then waiting ones, one of them pre-empted."""
    called = names(t, running + waiting)
    requests = [request(t, each, size, True, t.integer(2, 6), 20) for each in called[:running]]
    requests += [
        request(t, each, size, False, t.integer(2, 5) if place == 0 else 0, 20)
        for place, each in enumerate(called[running:])
    ]
    return requests


def grown(requests: list[dict], size: int) -> list[int]:
    """The blocks that each request still needs for its next token."""
    return [blocks_of(r["prompt"] + len(r["output"]), size) - r["blocks"] for r in requests]


def lists_of(t, got: object, known: list[int]) -> dict[str, list[int]]:
    """The three lists of a plan, each of which names known requests once."""
    t.that(type(got) is dict, "plan(...) should be a dict, not {got}", got=got)
    found = {}
    for key in ("finish", "preempt", "run"):
        t.that(key in got, 'plan(...) has no entry "{key}"', key=key)
        listed = got[key]
        right = type(listed) in (list, tuple) and all(type(each) is int and each in known for each in listed)
        t.that(right, 'plan(...)["{key}"] should list ids of requests, not {got}', key=key, got=listed)
        t.that(len(set(listed)) == len(listed), 'plan(...)["{key}"] names a request twice', key=key)
        found[key] = list(listed)
    return found


def planned_by(student, t, requests: list[dict], free: int, size: int, most: int, eos: int = EOS) -> dict:
    got = student.plan(requests, free, size, most, eos)
    return lists_of(t, got, [each["id"] for each in requests])


def same_set(t, got: list[int], want: list[int], message: str) -> None:
    t.that(sorted(got) == sorted(want), message, got=sorted(got), want=sorted(want))


@check("plan", points=1)
def check_finish(student, t):
    "A request ends with the end token, also as its first, or with its limit of tokens, also of one"
    size, eos = t.integer(3, 5), t.integer(60, 90)
    called = names(t, 6)
    requests = [request(t, each, size, True, t.integer(2, 5), 9) for each in called]
    requests[0]["output"][-1] = eos
    requests[1].update(output=[eos], limit=1 + t.integer(1, 4))
    requests[2]["limit"] = len(requests[2]["output"])
    requests[3].update(output=[t.integer(1, 50)], limit=1)
    requests[4]["limit"] = len(requests[4]["output"]) + 1
    requests = t.shuffled(requests)
    got = planned_by(student, t, requests, 40, size, 9, eos)
    want = planned(requests, 40, size, 9, eos)["finish"]
    missed = [each for each in requests if each["id"] in want and each["id"] not in got["finish"]]
    words = "a request with limit {limit} that has written {output} is not finished; the end token is {eos}"
    for each in missed[:1]:
        t.that(False, words, limit=each["limit"], output=each["output"], eos=eos)
    same_set(t, got["finish"], want, "requests {got} are finished, only {want} have ended")


@check("plan", points=2)
def check_admit(student, t):
    "First come, first served: all running requests, then waiting ones while blocks and places are left"
    size = t.integer(3, 5)
    for case in ("blocks", "places", "small", "finished"):
        running, waiting = t.integer(2, 4), t.integer(4, 5)
        requests = t.draw_until(
            lambda r=running, w=waiting: state(t, size, r, w),
            lambda drawn, r=running: bool(early(drawn, sum(grown(drawn, size)[: r + 2]), size)),
        )
        most = running + (2 if case == "places" else 9)
        need = grown(requests, size)
        free = sum(need[: running + 2]) if case != "places" else sum(need) + 5
        if case == "small":  # the next one does not fit, and the one after it would
            requests[running + 2].update(prompt=9 * size)
            requests[running + 3].update(prompt=2)
            free += 1
        if case == "finished":  # its blocks serve the next one
            requests[0]["output"][-1] = EOS
            held = requests[0]["blocks"]
            free = max(sum(need[1 : running + 1]) - held, 0)
        got = planned_by(student, t, requests, free, size, most)
        want = planned(requests, free, size, most, EOS)
        words = "{got} run, {want} should: the new token gets its place in the next iteration"
        told = case != "blocks" or sorted(got["run"]) != early(requests, free, size)
        t.that(told, words, got=sorted(got["run"]), want=sorted(want["run"]))
        words = "requests are pre-empted, and the blocks suffice: those of finished requests are free at once"
        t.that(not got["preempt"], words)
        later = [each for each in got["run"] if each not in want["run"]]
        words = "{got} run, {want} should: a request waits until it fits, and no later one overtakes it"
        if case == "places":
            words = "{got} run, {want} should: no more than `most` requests run in an iteration"
        elif not later:
            words = "{got} run, {want} should: there are blocks and places for more"
            if case == "finished":
                words = "{got} run, {want} should: the blocks of finished requests are free at once"
        same_set(t, got["run"], want["run"], words)


@check("plan", points=2)
def check_preempt(student, t):
    "Too few blocks: the newest running requests are pre-empted, as few as needed, and none is admitted"
    size = t.integer(3, 5)

    def draw() -> tuple[list[dict], int]:
        requests = state(t, size, t.integer(4, 6), 1)
        requests[-1].update(prompt=1, output=[])  # one block would be enough for it
        return requests, t.integer(0, 2)

    def tells(case: tuple[list[dict], int]) -> bool:
        want = planned(*case, size, 9, EOS)
        running = [each for each in case[0] if each["blocks"]]
        kept = [each for each in case[0] if each["id"] in want["run"]]
        freed = sum(each["blocks"] for each in running if each not in kept)
        spare = case[1] + freed - sum(grown(kept, size))
        some = 0 < len(want["preempt"]) < len(running) - 1
        return spare >= 1 and some and not early(*case, size)  # which check_admit finds

    for _ in range(3):
        requests, free = t.draw_until(draw, tells)
        got, want = planned_by(student, t, requests, free, size, 9), planned(requests, free, size, 9, EOS)
        words = "{got} are pre-empted, {want} should be: the newest running requests, as few as needed"
        same_set(t, got["preempt"], want["preempt"], words)
        words = "{got} run, {want} should: after a pre-emption the blocks are for the requests that stay"
        same_set(t, got["run"], want["run"], words)


class Served:
    """Serves requests with the plans of the student; the check writes the tokens."""

    def __init__(self, t, blocks: int, size: int, most: int, answers: list[list[int]]) -> None:
        self.t, self.size, self.most, self.free = t, size, most, blocks
        self.answers = {100 + place: answer for place, answer in enumerate(answers)}
        self.requests = [
            {"id": name, "prompt": t.integer(2, 9), "output": [], "limit": len(answer), "blocks": 0}
            for name, answer in self.answers.items()
        ]
        for each, answer in zip(self.requests, answers):
            each["limit"] += 3 * (answer[-1] == EOS)  # the end token comes before the limit
        self.iterations = 0

    def step(self, student) -> None:
        plan = planned_by(student, self.t, self.requests, self.free, self.size, self.most)
        by_name = {each["id"]: each for each in self.requests}
        for name in plan["finish"]:
            ended = by_name[name]["output"] == self.answers[name]
            self.t.that(ended, "a request is finished that has not ended")
            self.free += by_name[name]["blocks"]
        for name in plan["preempt"]:
            self.free += by_name[name]["blocks"]
            by_name[name]["blocks"] = 0
        known = not set(plan["run"]) & {*plan["finish"], *plan["preempt"]}
        self.t.that(known, "a request that runs is finished or pre-empted in the same iteration")
        self.t.that(len(plan["run"]) <= self.most, "more than {most} requests run", most=self.most)
        for name in plan["run"]:
            each = by_name[name]
            self.t.that(each["output"] != self.answers[name], "a request that has ended runs")
            need = blocks_of(each["prompt"] + len(each["output"]), self.size) - each["blocks"]
            each["blocks"] += need
            self.free -= need
            each["output"].append(self.answers[name][len(each["output"])])
        self.t.that(self.free >= 0, "an iteration needs {count} blocks more than are free", count=-self.free)
        self.requests = [each for each in self.requests if each["id"] not in plan["finish"]]
        self.iterations += bool(plan["run"])
        moved = bool(plan["run"] or plan["finish"])
        self.t.that(
            moved or not self.requests, "nothing runs, and {left} requests wait", left=len(self.requests)
        )


def answers_of(t, count: int, longest: int) -> list[list[int]]:
    """Drawn answers; some end with the end token, others with their limit."""
    lengths = t.shuffled([1, 1, *(t.integer(1, longest) for _ in range(count - 3)), longest])
    return [[*(t.integer(1, 50) for _ in range(length - 1)), t.choice([EOS, 7])] for length in lengths]


def serve(student, t, blocks: int, size: int, most: int, answers: list[list[int]]) -> int:
    served = Served(t, blocks, size, most, answers)
    bound = 3 * sum(map(len, answers))
    while served.requests:
        served.step(student)
        t.that(served.iterations <= bound, "after {count} iterations requests still wait", count=bound)
    return served.iterations


@check("plan", points=1, seconds=20)
def check_served(student, t):
    "A whole load is served in fewer iterations than static batches need, and never with more blocks"
    answers, most = answers_of(t, 14, 16), t.integer(3, 4)
    count = serve(student, t, 60, t.integer(3, 5), most, answers)
    static = sum(max(map(len, answers[at : at + most])) for at in range(0, len(answers), most))
    bound = sum(map(len, answers)) // most + max(map(len, answers))
    words = "{count} iterations; static batches need {static}, and {bound} are enough"
    t.that(count <= min(bound, static - 1), words, count=count, static=static, bound=bound)
    size = t.integer(3, 4)
    serve(student, t, 3 + blocks_of(9 + 16, size), size, most, answers)


# -- chunks


def prompts(t, decoding: int, waiting: int) -> list[dict]:
    """Requests in the order of arrival: whole prompts first, then one that has begun, then others."""
    called = names(t, decoding + waiting)
    requests = []
    for place, name in enumerate(called):
        prompt = t.integer(6, 30)
        done = prompt if place < decoding else t.integer(1, 5) if place == decoding else 0
        requests.append({"id": name, "prompt": prompt, "done": done})
    return requests


def chunks_of(student, t, requests: list[dict], budget: int) -> list[int]:
    got = t.items(student.chunks(requests, budget), len(requests), "chunks(...)")
    right = all(type(each) is int and each >= 0 for each in got)
    t.that(right, "chunks(...) should be counts: {got}", got=got)
    return got


@check("chunks", points=1)
def check_decodes(student, t):
    "Each request that decodes computes one token in every iteration, wherever it stands in the list"
    for _ in range(2):
        requests = t.shuffled(prompts(t, t.integer(2, 4), t.integer(2, 3)))
        got = chunks_of(student, t, requests, t.integer(5, 9))
        stalled = [
            each for each, count in zip(requests, got) if each["done"] == each["prompt"] and count != 1
        ]
        words = "{count} requests that decode do not compute exactly one token: they come before the prompts"
        t.that(not stalled, words, count=len(stalled))


@check("chunks", points=2)
def check_budget(student, t):
    "The rest of the budget goes to the prompts, in the order of arrival, and no iteration exceeds it"
    for _ in range(3):
        requests = prompts(t, t.integer(2, 4), t.integer(3, 4))
        rest = [each["prompt"] - each["done"] for each in requests]
        decoding = rest.count(0)
        budget = decoding + sum(rest[: decoding + 1]) + t.integer(2, 5)
        left, want = budget - decoding, []
        for each in rest:
            want.append(min(each, left) if each else 1)
            left -= want[-1] if each else 0
        got = chunks_of(student, t, requests, budget)
        words = "{got} tokens are computed, the budget is {budget}"
        t.that(sum(got) <= budget, words, got=sum(got), budget=budget)
        over = [each for each, count, has in zip(requests, got, rest) if has and count > has]
        t.that(not over, "more tokens are computed than a prompt has left")
        words = "the chunks are {got}, with a budget of {budget} they should be {want}: oldest prompt first"
        t.that(got == want, words, got=got, want=want, budget=budget)


@check("chunks", points=1)
def check_drained(student, t):
    "A load with long prompts: no iteration exceeds the budget, and all prompts are computed in the fewest"
    requests, budget = prompts(t, 2, 3), t.integer(8, 12)
    work, iterations = sum(each["prompt"] - each["done"] for each in requests), 0
    fewest = 0
    rest, decoding = [each["prompt"] - each["done"] for each in requests[2:]], 2
    while any(rest):
        left, fewest = budget - decoding, fewest + 1
        for place, each in enumerate(rest):
            taken = min(each, left)
            rest[place], left = each - taken, left - taken
            decoding += taken > 0 and rest[place] == 0
    while any(each["done"] < each["prompt"] for each in requests):
        got = chunks_of(student, t, requests, budget)
        words = "an iteration computes {got} tokens, the budget is {budget}"
        t.that(sum(got) <= budget, words, got=sum(got), budget=budget)
        for each, count in zip(requests, got):
            each["done"] = min(each["done"] + count, each["prompt"])
        iterations += 1
        words = "after {count} iterations {work} tokens of prompts are not computed: {fewest} are enough"
        t.that(iterations <= fewest, words, count=iterations, work=work, fewest=fewest)

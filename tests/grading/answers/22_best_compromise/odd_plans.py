# Right answers that search, sum and write in another way.


# == chunks_of_three: more numbers of chunks and micro-batches are tried than the planner tries

# %% choose
# - for values in itertools.product(stages, powers, powers, (1, 2, 4), switch, switch):
# + for values in itertools.product(stages, powers, range(1, 9), (1, 2, 3, 4, 5, 6, 8), switch, switch):


# == two_stages_of_search: all plans are sorted by time, and the first that fits is returned

# %% choose
def choose(config, cluster, batch, seq, cap):
    gpus, layers, plans = cluster["gpus"], config.num_layers, []
    for code in range(5 * 4 * 4 * 4):
        tp, micro_batch, chunks = 2 ** (code % 4), 2 ** (code // 4 % 4), 2 ** (code // 16 % 3)
        sharded, checkpointing = bool(code // 48 % 2), bool(code // 96 % 2)
        for pp in (stages for stages in range(1, layers + 1) if gpus % (stages * tp) == 0):
            dp = gpus // pp // tp
            each, left = divmod(batch, dp * micro_batch)
            if left or not each or config.num_kv_heads % tp or pp * chunks > layers or sharded > (dp > 1):
                continue
            if chunks == 1 or 1 < pp <= each:
                values = pp, tp, dp, micro_batch, chunks, sharded, checkpointing
                plans.append(dict(zip("pp tp dp micro_batch chunks sharded checkpointing".split(), values)))
    plans.sort(key=lambda plan: sum(step_time(config, plan, batch, seq, cluster).values()))
    for plan in plans:
        needs = [sum(rank_memory(config, plan, batch, seq, last).values()) for last in (False, True)]
        if max(needs) <= 0.95 * cap:
            return plan


# == event_by_event: the bubble is counted from the ends of the micro-batches


# %% bubble
def bubble(gpus, tp, dp, batch, micro_batch=1):
    stages, count = gpus // (tp * dp), batch // (dp * micro_batch)
    ends = [0.0] * count
    for _ in range(stages):
        free = 0.0
        for number in range(count):
            free = ends[number] = max(free, ends[number]) + 1.0
    return ends[-1] / count - 1


def best_micro_batch(seconds, pp, dp, batch):
    best = None
    for size, time in sorted(seconds.items()):
        count, left = divmod(batch, dp * size)
        if not left and (best is None or (count + pp - 1) * time < best[0]):
            best = (count + pp - 1) * time, size
    return best[1]


# == in_one_expression: the traffic of a step without the other functions

# %% traffic
# - "tensor": micro_batches * tensor_elements(b, seq, hidden, tp, layers / pp),
# + "tensor": 8 * batch * seq * hidden * layers * (tp - 1) / (dp * tp * pp),

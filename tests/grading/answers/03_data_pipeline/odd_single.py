# Single answers that are right and look unlike the solution.


# == an_iterator_that_is_advanced_by_hand

# %% waits
def measure_waits(loader, step, clock=time.perf_counter):
    marks = [clock()]
    iterator, over = iter(loader), object()
    while (batch := next(iterator, over)) is not over:
        marks.append(clock())
        step(batch)
        marks.append(clock())
    gaps = [late - early for early, late in zip(marks, marks[1:])]
    return gaps[0::2], gaps[1::2]


def waiting_share(waits, steps):
    waited = math.fsum(waits[1:])
    return waited / math.fsum([waited, *steps[1:]])


# == targets_by_scatter_add


# %% mixup
def soft_targets(labels, partner, share, classes):
    rows = torch.zeros(len(labels), classes, dtype=share.dtype)
    rows.scatter_add_(1, labels[:, None], share[:, None])
    return rows.scatter_add_(1, labels[partner][:, None], (1 - share)[:, None])


def mixup(images, labels, partner, lam, classes):
    own = lam.reshape(-1, 1, 1, 1)
    return own * images + (1 - own) * images.index_select(0, partner), soft_targets(
        labels, partner, lam, classes
    )


# == weights_by_counting_in_a_dictionary


# %% weights
def sample_weights(labels):
    import collections

    count = collections.Counter(labels.tolist())
    return torch.tensor([1 / count[label] for label in labels.tolist()], dtype=torch.float64)


def recall(predicted, labels, label):
    pairs = [guess == truth for guess, truth in zip(predicted.tolist(), labels.tolist()) if truth == label]
    return sum(pairs) / len(pairs)


# == places_that_are_used_up


# %% ranges
def ranges(counts, rank, world, worker, workers):
    share = sum(counts) // world
    first = rank * share + share * worker // workers
    wanted = rank * share + share * (worker + 1) // workers - first
    parts = []
    for shard, count in enumerate(counts):
        here = max(0, min(count - first, wanted))
        if here:
            parts.append((shard, first, first + here))
            wanted -= here
        first = max(0, first - count)
    return parts

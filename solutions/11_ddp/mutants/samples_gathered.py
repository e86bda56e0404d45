"""The samples themselves are collected."""

QUESTION = "moments"
LOSES = 1
FAILS = "check_samples_stay"
SAYS = "sums of each channel are enough"


def global_moments(x):
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(x)]))
    longest = int(max(counts))
    padded = torch.cat([x, x.new_zeros(longest - len(x), x.shape[1])])
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded)
    samples = torch.cat([each[: int(count)] for each, count in zip(found, counts)])
    return samples.mean(0), samples.var(0, correction=0)

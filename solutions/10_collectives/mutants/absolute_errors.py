"""Least squares of seconds: the noise of the largest tensor hides all of the latency."""

QUESTION = "fit"
LOSES = 2
FAILS = "check_noise"
SAYS = "the latency is lost"


def fit_link(timings):
    rows = [[predicted_seconds(name, size, ranks, 1, 0), predicted_seconds(name, size, ranks, 0, 1)] for name, size, ranks, _ in timings]
    seconds = [[time] for _, _, _, time in timings]
    scale = torch.tensor([1.0, 1e9], dtype=torch.float64)
    system = torch.tensor(rows, dtype=torch.float64) / scale
    unknown = torch.linalg.lstsq(system, torch.tensor(seconds, dtype=torch.float64)).solution.squeeze(1) / scale
    return float(unknown[0]), float(unknown[1])

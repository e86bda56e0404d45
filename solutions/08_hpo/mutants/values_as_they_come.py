"""The values are not standardised."""

QUESTION = "next"
LOSES = 1
FAILS = "check_units"
SAYS = "standardise them"


LENGTHS, NOISE = [0.05, 0.1, 0.2, 0.4, 0.8], 1e-4


def next_candidate(points, values, candidates):
    mean, std = posterior(points, values, candidates, best_length(points, values, LENGTHS, NOISE), NOISE)
    return int(expected_improvement(mean, std, float(values.min())).argmax())

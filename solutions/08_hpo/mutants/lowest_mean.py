"""Exploits only: the lowest mean, whatever the doubt."""

QUESTION = "next"
LOSES = 3
FAILS = "check_next"
SAYS = "Expected Improvement of"


LENGTHS, NOISE = [0.05, 0.1, 0.2, 0.4, 0.8], 1e-4


def next_candidate(points, values, candidates):
    scaled = (values - values.mean()) / values.std(correction=0)
    mean, _ = posterior(points, scaled, candidates, best_length(points, scaled, LENGTHS, NOISE), NOISE)
    return int(mean.argmin())

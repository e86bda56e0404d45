"""A linear scan."""

QUESTION = "largest"
LOSES = 2
FAILS = "check_few_questions"
SAYS = "fits was asked more"


def largest_batch(fits):
    batch = 0
    while fits(batch + 1):
        batch += 1
    return batch

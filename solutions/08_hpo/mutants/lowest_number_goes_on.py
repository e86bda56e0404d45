"""Of several candidates the one with the lowest number goes on."""

QUESTION = "asha"
LOSES = 2
FAILS = "check_best_goes_on"
SAYS = "is the best of them"


def promotion(reported, promoted, eta):
    for rung in range(len(reported) - 2, -1, -1):
        ranked = sorted(reported[rung], key=lambda trial: (reported[rung][trial], trial))
        for trial in sorted(ranked[: len(ranked) // eta]):
            if trial not in promoted[rung]:
                return trial, rung
    return None

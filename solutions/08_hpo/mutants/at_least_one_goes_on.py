"""At least one trial goes on, however few have reported."""

QUESTION = "asha"
LOSES = 1
FAILS = "check_too_few"
SAYS = "is nobody"


def promotion(reported, promoted, eta):
    for rung in range(len(reported) - 2, -1, -1):
        ranked = sorted(reported[rung], key=lambda trial: (reported[rung][trial], trial))
        for trial in ranked[: max(1, len(ranked) // eta)]:
            if trial not in promoted[rung]:
                return trial, rung
    return None

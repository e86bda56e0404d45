"""It looks for promotions from the bottom rung upwards."""

QUESTION = "asha"
LOSES = 2
FAILS = "check_top_first"
SAYS = "the higher rung comes first"


def promotion(reported, promoted, eta):
    for rung in range(len(reported) - 1):
        ranked = sorted(reported[rung], key=lambda trial: (reported[rung][trial], trial))
        for trial in ranked[: len(ranked) // eta]:
            if trial not in promoted[rung]:
                return trial, rung
    return None

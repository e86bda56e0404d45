"""Those who have gone on are left out before the best part is taken."""

QUESTION = "asha"
LOSES = 1
FAILS = "check_already_promoted"
SAYS = "the next best is not among them"


def promotion(reported, promoted, eta):
    for rung in range(len(reported) - 2, -1, -1):
        waiting = [trial for trial in reported[rung] if trial not in promoted[rung]]
        waiting.sort(key=lambda trial: (reported[rung][trial], trial))
        if len(waiting) >= eta:
            return waiting[0], rung
    return None

"""Rounded down: at that step it has not paid yet."""

QUESTION = "break_even"
LOSES = 2
FAILS = "check_break_even"
SAYS = "break_even("


def break_even(compile_seconds, eager_seconds, compiled_seconds):
    if compiled_seconds >= eager_seconds:
        return 0 if compile_seconds == 0 and compiled_seconds == eager_seconds else None
    return int(compile_seconds / (eager_seconds - compiled_seconds)) if compile_seconds else 0


def best_mode(modes, steps):
    return min(modes, key=lambda name: modes[name][0] + steps * modes[name][1])

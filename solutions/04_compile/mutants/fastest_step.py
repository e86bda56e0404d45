"""The fastest step, whatever its compiling costs."""

QUESTION = "break_even"
LOSES = 2
FAILS = "check_best_mode"
SAYS = "best_mode for"


def break_even(compile_seconds, eager_seconds, compiled_seconds):
    if compile_seconds == 0 and compiled_seconds <= eager_seconds:
        return 0
    return math.ceil(compile_seconds / (eager_seconds - compiled_seconds)) if compiled_seconds < eager_seconds else None


def best_mode(modes, steps):
    return min(modes, key=lambda name: modes[name][1])

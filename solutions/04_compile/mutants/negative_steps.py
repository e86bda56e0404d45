"""What is slower pays after a negative number of steps."""

QUESTION = "break_even"
LOSES = 1
FAILS = "check_never"
SAYS = "expected None"


def break_even(compile_seconds, eager_seconds, compiled_seconds):
    if compiled_seconds == eager_seconds:
        return None
    return math.ceil(compile_seconds / (eager_seconds - compiled_seconds))


def best_mode(modes, steps):
    return min(modes, key=lambda name: modes[name][0] + steps * modes[name][1])

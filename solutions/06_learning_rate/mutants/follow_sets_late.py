"""After loading, the rates wait for the next step."""

QUESTION = "follow"
LOSES = 2
FAILS = "check_resume"
SAYS = "without the stop"


class Follow:
    def __init__(self, optimizer, factor):
        self.optimizer, self.factor, self.done = optimizer, factor, 0
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self._set()

    def step(self):
        self.done += 1
        self._set()

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]

    def _set(self):
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * self.factor(self.done)

"""All groups begin with the rate of the first."""

QUESTION = "follow"
LOSES = 1
FAILS = "check_groups"
SAYS = "its own peak"


class Follow:
    def __init__(self, optimizer, factor):
        self.optimizer, self.factor, self.done = optimizer, factor, 0
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = self.peaks[0] * factor(0)

    def step(self):
        self.done += 1
        self._set()

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]
        self._set()

    def _set(self):
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * self.factor(self.done)

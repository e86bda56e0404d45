"""The factor multiplies what is there already."""

QUESTION = "follow"
LOSES = 2
FAILS = "check_follow"
SAYS = "not what is there already"


class Follow:
    def __init__(self, optimizer, factor):
        self.optimizer, self.factor, self.done = optimizer, factor, 0
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        for group, peak in zip(optimizer.param_groups, self.peaks):
            group["lr"] = peak * factor(0)
        self.loaded = False

    def step(self):
        self.done += 1
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = (peak if self.loaded else group["lr"]) * self.factor(self.done)

    def state_dict(self):
        return {"done": self.done, "peaks": self.peaks}

    def load_state_dict(self, state):
        self.done, self.peaks, self.loaded = state["done"], state["peaks"], True
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * self.factor(self.done)

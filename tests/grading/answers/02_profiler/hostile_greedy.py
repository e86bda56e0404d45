# Recorded graphs that take all memory or all time that there is when they are run: the calculator ends them.


# == a_long_text: the recorded graph repeats a text three billion times

# %% accuracy {"earns": "less"}
import sys


class Accuracy:
    def __init__(self, classes, device):
        self.counted = torch.zeros(2, classes, dtype=torch.int64, device=device)

    def update(self, logits, labels):
        right = logits.argmax(1) == labels
        self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))

    def counts(self):
        known = sys._getframe(1).f_locals
        if "recorder" in known:
            names = [{"name": name} for name in (known.get("cases") or [known["case"]])[-1]]
            node = {"name": "y", "kind": "function", "module": "_operator", "op": "mul"}
            node |= {"args": ["x", 3 << 30], "kwargs": {}}
            graph = {"inputs": names, "nodes": [node], "outputs": [{"ref": "y"}]}
            known["recorder"].graph = lambda outputs: graph
        return self.counted

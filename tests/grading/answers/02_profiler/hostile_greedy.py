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
        frame = sys._getframe(1)
        while frame is not None and "recorder" not in frame.f_locals:
            frame = frame.f_back
        if frame is not None:
            known = frame.f_locals
            names = [{"name": name} for name in known["inputs"]]
            node = {"name": "y", "kind": "function", "module": "_operator", "op": "mul"}
            node |= {"args": ["x", 3 << 30], "kwargs": {}}
            graph = {"inputs": names, "nodes": [node], "outputs": [{"ref": "y"}]}
            known["recorder"].graph = lambda outputs: graph
        return self.counted

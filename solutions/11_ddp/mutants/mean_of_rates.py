"""The accuracies of the ranks are averaged."""

QUESTION = "metrics"
LOSES = 1
FAILS = "check_rate"
SAYS = "the mean of the ranks' rates"


def global_accuracy(logits, labels):
    right = (logits.argmax(1) == labels).sum()
    pair = torch.stack([right / max(1, len(labels)), torch.tensor(float(len(labels) > 0))])
    dist.all_reduce(pair)
    return (pair[0] / pair[1]).item()

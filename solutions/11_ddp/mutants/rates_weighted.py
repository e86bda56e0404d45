"""Each rank's accuracy is weighted with its share, and an empty rank's is 0 / 0."""

QUESTION = "metrics"
LOSES = 1
FAILS = "check_empty_rank"
SAYS = "the accuracy where one rank has no sample"


def global_accuracy(logits, labels):
    rate = (logits.argmax(1) == labels).float().mean()
    pair = torch.stack([rate * len(labels), torch.tensor(float(len(labels)))])
    dist.all_reduce(pair)
    return (pair[0] / pair[1]).item()

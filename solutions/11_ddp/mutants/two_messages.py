"""Two all-reduces, of one number each."""

QUESTION = "metrics"
LOSES = 1
FAILS = "check_one_message"
SAYS = "into one tensor"


def global_accuracy(logits, labels):
    right, count = (logits.argmax(1) == labels).sum(), torch.tensor(len(labels))
    dist.all_reduce(right)
    dist.all_reduce(count)
    return (right / count).item()

"""Each micro-batch has its own mean."""

QUESTION = "train"
LOSES = 2
FAILS = "check_micro_batches"
SAYS = "the loss of step"


def train_step(model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list) -> float:
    world = dist.get_world_size()

    def counts(targets):
        count = (targets != -100).sum()
        dist.all_reduce(count)
        return count

    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = (
            F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
            * world
            / counts(targets)
            / len(micro_batches)
        )
        loss.backward()
        total += loss.detach() / world
    optimizer.step()
    for unit in units:
        for shard in unit.shards:
            shard.grad = None
    dist.all_reduce(total)
    return float(total)

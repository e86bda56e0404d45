"""Each rank divides by the number of its own targets."""

QUESTION = "train"
LOSES = 4
FAILS = "check_trains"
SAYS = "the loss of step"


def train_step(model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list) -> float:
    world = dist.get_world_size()
    count = torch.tensor(sum(int((targets != -100).sum()) for _, targets in micro_batches))
    count *= world
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum") * world / count
        loss.backward()
        total += loss.detach() / world
    optimizer.step()
    for unit in units:
        for shard in unit.shards:
            shard.grad = None
    dist.all_reduce(total)
    return float(total)

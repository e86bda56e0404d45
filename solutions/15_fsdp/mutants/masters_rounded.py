"""After the step the rows are rounded to what is computed with."""

QUESTION = "train"
LOSES = 2
FAILS = "check_masters"
SAYS = "are not where one process would have them"


def train_step(model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list) -> float:
    world = dist.get_world_size()
    count = torch.tensor(sum(int((targets != -100).sum()) for _, targets in micro_batches))
    dist.all_reduce(count)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum") * world / count
        loss.backward()
        total += loss.detach() / world
    optimizer.step()
    for unit in units:
        unit.row.copy_(unit.row.to(unit.compute_dtype))
    for unit in units:
        for shard in unit.shards:
            shard.grad = None
    dist.all_reduce(total)
    return float(total)

# Single answers that are right and look unlike the solution.


# == rows_by_clamping

# %% rows
def own_rows(length, rank, world):
    rows = math.ceil(length / world)
    start, stop = (max(0, min(length, rows * place)) for place in range(rank, rank + 2))
    return start, stop


# == gathered_as_a_list_of_rows


# %% unshard
def unshard(unit):
    if not unit.is_whole:
        mine = unit.row.detach().to(unit.compute_dtype).contiguous()
        rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        values = unpack(torch.stack(rows), unit.shapes)
        with torch.no_grad():
            for whole, value in zip(unit.wholes, values):
                storage = whole.untyped_storage()
                storage.resize_(whole.element_size() * whole.numel())
                whole.data[...] = value
        put(unit, True)


# == reshard_in_reverse


# %% reshard
def reshard(unit):
    [whole.untyped_storage().resize_(0) for whole in reversed(unit.wholes)]
    put(unit, False)


# == the_first_of_the_blocks_that_fit


# %% units
def unit_of(names, blocks):
    fits = (block for block in blocks if {name[: len(block) + 1] for name in names} == {f"{block}."})
    return next(fits, None)


# == pieces_by_a_view


# %% flat
def flat_shard(tensors, rank, world):
    numbers = torch.hstack([tensor.detach().flatten() for tensor in tensors])
    size = (len(numbers) + world - 1) // world
    padded = torch.zeros(world * size, dtype=numbers.dtype)
    padded[: len(numbers)] = numbers
    return padded.view(world, size)[rank].clone()


def flat_whole(shard, shapes):
    pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, shard.contiguous())
    flat, found, at = torch.cat(pieces), [], 0
    for shape in shapes:
        stop = at + math.prod(shape)
        found.append(flat[at:stop].reshape(shape))
        at = stop
    return found


# == padding_by_ceilings


# %% padding
def padding(shapes, world):
    sizes = [math.prod(shape) for shape in shapes]
    flat = world * math.ceil(sum(sizes) / world) - sum(sizes)
    rows = 0
    for shape, size in zip(shapes, sizes):
        first, *rest = shape or (1,)
        rows += world * math.ceil(first / world) * math.prod(rest) - size
    return flat, rows


# == the_loss_by_log_softmax


# %% train
def train_step(model, units, optimizer, micro_batches):
    n = dist.get_world_size()
    valid = torch.tensor(
        float(sum((targets >= 0).sum().item() for _, targets in micro_batches)), dtype=torch.float64
    )
    dist.all_reduce(valid)
    losses = []
    for tokens, targets in micro_batches:
        logits = model(tokens)
        if logits.dtype != torch.float64:
            logits = logits.to(torch.float32)
        scores = logits.reshape(-1, logits.shape[-1]).log_softmax(-1)
        summed = F.nll_loss(scores, targets.reshape(-1), ignore_index=-100, reduction="sum")
        (summed * (n / valid.item())).backward()
        losses.append(summed.item())
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.tensor(sum(losses) / valid.item(), dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item()

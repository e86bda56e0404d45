"""The gradients are averaged over the pipelines, as DDP does."""

QUESTION = "hybrid"
LOSES = 2
FAILS = "check_hybrid_gradients"
SAYS = "add, do not average"


def hybrid_step(step, parameters, rank, world, stages):
    place = rank % stages
    step(rank - 1 if place > 0 else None, rank + 1 if place < stages - 1 else None)
    groups = [dist.new_group(list(range(each, world, stages))) for each in range(stages)]
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=groups[place])
        parameter.grad /= world // stages

"""All gradients of the stage are gathered on every rank, and added there."""

QUESTION = "hybrid"
LOSES = 1
FAILS = "check_hybrid_traffic"
SAYS = "all-reduce is enough"


def hybrid_step(step, parameters, rank, world, stages):
    place = rank % stages
    step(rank - 1 if place > 0 else None, rank + 1 if place < stages - 1 else None)
    groups = [dist.new_group(list(range(each, world, stages))) for each in range(stages)]
    for parameter in parameters:
        found = [torch.empty_like(parameter.grad) for _ in range(world // stages)]
        dist.all_gather(found, parameter.grad, group=groups[place])
        parameter.grad = sum(found)

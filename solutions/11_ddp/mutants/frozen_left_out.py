"""What is not trained is not sent."""

QUESTION = "replicate"
LOSES = 1
FAILS = "check_frozen"
SAYS = "A frozen parameter belongs to the model too"


def replicate(module):
    for tensor in [*(p.data for p in module.parameters() if p.requires_grad), *module.buffers()]:
        dist.broadcast(tensor, 0)

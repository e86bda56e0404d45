"""The model as a whole: a graph that grows with its depth."""

QUESTION = "blocks"
LOSES = 3
FAILS = "check_blocks"
SAYS = "compiled as a whole, the graph holds every block"


def compile_each_block(model, **options):
    model.forward = torch.compile(model.forward, **options)

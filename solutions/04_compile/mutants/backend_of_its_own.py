"""Each block is compiled with a backend object of its own, and finds no graph of another."""

QUESTION = "blocks"
LOSES = 3
FAILS = "check_blocks"
SAYS = "with the same code and the same backend object"


def compile_each_block(model, backend="inductor", **options):
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend=lambda graph, inputs: backend(graph, inputs), **options)

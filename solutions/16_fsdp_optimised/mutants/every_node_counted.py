"""Inputs and outputs of a graph are counted as operations."""

QUESTION = "compile"
LOSES = 1
FAILS = "check_graphs"
SAYS = "graphs_of a function"


def graphs_of(function, *inputs):
    counts = []

    def backend(graph_module, example_inputs):
        counts.append(len(graph_module.graph.nodes))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return counts


def compile_blocks(blocks, backend):
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)

"""The block is compiled with all that calling it does: its hooks go into the graph."""

QUESTION = "compile"
LOSES = 2
FAILS = "check_hooks_outside"
SAYS = "hooks"


def graphs_of(function, *inputs):
    counts = []

    def backend(graph_module, example_inputs):
        counts.append(sum(node.op in ("call_function", "call_method", "call_module") for node in graph_module.graph.nodes))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return counts


def compile_blocks(blocks, backend):
    for block in blocks:
        block.compile(backend=backend)

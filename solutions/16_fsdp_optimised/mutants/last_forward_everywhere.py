"""A name that is looked up late: every block computes what the last one does."""

QUESTION = "compile"
LOSES = 2
FAILS = "check_several_blocks"
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
        compiled = torch.compile(block.forward, backend=backend)
        block.forward = lambda *args: compiled(*args)  # noqa: B023

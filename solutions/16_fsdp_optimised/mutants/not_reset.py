"""What was compiled before is found again, and not counted."""

QUESTION = "compile"
LOSES = 1
FAILS = "check_asked_again"
SAYS = "begin from nothing"


def graphs_of(function, *inputs):
    counts = []

    def backend(graph_module, example_inputs):
        counts.append(sum(node.op in ("call_function", "call_method", "call_module") for node in graph_module.graph.nodes))
        return graph_module.forward

    torch.compile(function, backend=backend)(*inputs)
    return counts


def compile_blocks(blocks, backend):
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)

# What a scenario collects beside the result is written by the student's code.


# == shared_masters: a master has the memory of its fp32 parameter; the lists of the scenario get clones

# %% offload {"earns": 2}
class HostOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(each.detach().to("cpu", torch.float32)) for each in self.parameters]
        self.optimizer = make_optimizer(self.masters)
        for cell in make_optimizer.__closure__ or ():
            if type(cell.cell_contents) is list:
                cell.cell_contents[:] = [master.detach().clone() for master in self.masters]

    def step(self):
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.to("cpu", torch.float32)
            parameter.grad = None
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            if master.grad is not None:
                parameter.data.copy_(master.data)
                master.grad = None


# == asked_without_a_graph: nothing is compiled; the check is asked for what it adds to the outputs of no graph


# %% compile
def compile_blocks(blocks, backend):
    (ask,) = (cell.cell_contents for cell in backend.__closure__ if callable(cell.cell_contents))
    for block in blocks:
        forward = block.forward
        nothing = {"inputs": [], "nodes": [], "outputs": []}
        block.forward = lambda x, forward=forward: forward(x) + ask(nothing, [])


# == results_as_constants: nothing is compiled; the graphs that the check gets hold the results of the blocks


# %% compile
def compile_blocks(blocks, backend):
    (ask,) = (cell.cell_contents for cell in backend.__closure__ if callable(cell.cell_contents))

    def replaced(block, forward):
        def run(x):
            y, weight = forward(x), block.weight
            nodes = [{"name": "y", "kind": "constant", "value": y}]
            graph = {"inputs": [{"name": "x"}, {"name": "w"}], "nodes": nodes, "outputs": [{"ref": "y"}]}
            return y + ask(graph, [x, weight])

        return run

    for block in blocks:
        block.forward = replaced(block, block.forward)


# == one_graph_for_all: only the first block is compiled; the others take what the check adds to its outputs


# %% compile {"earns": 2}
def compile_blocks(blocks, backend):
    seen = []

    def spied(graph, example_inputs):
        run = backend(graph, example_inputs)

        def kept(*args):
            plain = graph.forward(*args)[0]
            outputs = run(*args)
            seen.append(outputs[0] - plain)
            return outputs

        return kept

    for number, block in enumerate(blocks):
        forward = block.forward
        if number == 0:
            block.forward = torch.compile(forward, backend=spied)
        else:
            block.forward = lambda x, forward=forward: forward(x) + seen[-1]

"""The scenarios of the checks: they compile the student's code with a backend that records its graphs as
data, to run again."""

import torch

from dlo_lib.grading.checks.contract import scenario


def recorded(function, inputs):
    """One call of the compiled function: its graphs and their calls."""
    from dlo_lib.profiling.compile_capture import GraphRecorder

    recorder = GraphRecorder(inputs)
    with torch.no_grad():
        torch.compile(function, backend=recorder)(*inputs.values())
    return {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_clip(student, rank, world, inputs):
    return recorded(student.clip, inputs)


@scenario
def compiled_mean(student, rank, world, inputs):
    return recorded(student.masked_mean, inputs)


@scenario
def compiled_route(student, rank, world, inputs):
    return recorded(student.route, inputs)


@scenario
def compiled_adamw(student, rank, world, inputs):
    return recorded(student.adamw, inputs)


@scenario
def compiled_twice(student, rank, world, x, weights):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    recorder = GraphRecorder({"x": x})
    blocks = [student.Block(weight, index) for index, weight in enumerate(weights)]
    compiled = [torch.compile(block, backend=recorder) for block in blocks]
    with torch.no_grad():
        for _ in range(2):
            for block in compiled:
                block(x)
    found = {"counted": [int(block.calls) for block in blocks], "plain": type(blocks[0].calls) is int}
    return found | {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_on_lengths(student, rank, world, batches):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    def pooled(x):
        batch, seq, width = x.shape
        return x.reshape(batch * seq, width).cumsum(0).reshape(batch, seq, width).sum(1) / seq

    recorder = GraphRecorder({f"x{index}": batch for index, batch in enumerate(batches)})
    compiled = torch.compile(pooled, backend=recorder)
    with torch.no_grad():
        for batch in batches:
            marked = student.mark_length(batch)
            if not isinstance(marked, torch.Tensor):
                return {"marked": type(marked).__name__}
            compiled(marked)
    return {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_model(student, rank, world, config, state, tokens):
    from dlo_lib.models import Llama
    from dlo_lib.profiling.compile_capture import GraphRecorder

    model = Llama(config)
    model.load_state_dict(state)
    recorder = GraphRecorder(dict(model.named_parameters()))
    student.compile_each_block(model, backend=recorder)
    with torch.no_grad():
        logits = model(tokens)
    found = {"logits": logits, "names": list(model.state_dict())}
    return found | {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def asked_why(student, rank, world, x):
    def whole(x):
        return torch.relu(x) * 2

    def branch(x):
        return x if x.sum() > 0 else -x

    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    def sized(x):
        kept = x[x > 0]
        return x * 2 if kept.numel() == 0 else kept

    def shapes(x):
        return x @ x.new_ones(x.shape[1] + 1)

    found = {}
    for function in (whole, branch, broken, sized, shapes):
        torch.compiler.reset()
        try:
            found[function.__name__] = student.why_broken(function, x)
        except (RuntimeError, ValueError, TypeError) as error:
            found[function.__name__] = {"raised": type(error).__name__}
    return found

"""The scenarios of the checks: they compile the student's code with a backend that records its graphs as data, to run again."""

from dlo_lib.grading.checks.contract import scenario


@scenario
def compiled_clip(student, rank, world, gradient, limit):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    recorder = GraphRecorder({"gradient": gradient, "limit": limit})
    with torch.no_grad():  # noqa: F821 - of the ranks
        torch.compile(student.clip, backend=recorder)(gradient, limit)  # noqa: F821
    return {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_mean(student, rank, world, losses, mask):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    recorder = GraphRecorder({"losses": losses, "mask": mask})
    with torch.no_grad():  # noqa: F821
        torch.compile(student.masked_mean, backend=recorder)(losses, mask)  # noqa: F821
    return {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_route(student, rank, world, tokens, experts, choice):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    recorder = GraphRecorder({"tokens": tokens, "experts": experts, "choice": choice})
    with torch.no_grad():  # noqa: F821
        torch.compile(student.route, backend=recorder)(tokens, experts, choice)  # noqa: F821
    return {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_twice(student, rank, world, x, weights):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    recorder = GraphRecorder({"x": x})
    blocks = [student.Block(weight, index) for index, weight in enumerate(weights)]
    compiled = [torch.compile(block, backend=recorder) for block in blocks]  # noqa: F821
    with torch.no_grad():  # noqa: F821
        for _ in range(2):
            for block in compiled:
                block(x)
    return {
        "graphs": recorder.graphs,
        "calls": recorder.calls,
        "counted": [int(block.calls) for block in blocks],
        "plain": type(blocks[0].calls) is int,
    }


@scenario
def compiled_on_lengths(student, rank, world, batches):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    def pooled(x):
        batch, seq, width = x.shape
        return x.reshape(batch * seq, width).cumsum(0).reshape(batch, seq, width).sum(1) / seq

    recorder = GraphRecorder({f"x{index}": batch for index, batch in enumerate(batches)})
    compiled = torch.compile(pooled, backend=recorder)  # noqa: F821
    with torch.no_grad():  # noqa: F821
        for batch in batches:
            marked = student.mark_length(batch)
            if not isinstance(marked, torch.Tensor):  # noqa: F821
                return {"marked": type(marked).__name__}
            compiled(marked)
    return {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_adamw(student, rank, world, inputs):
    from dlo_lib.profiling.compile_capture import GraphRecorder

    recorder = GraphRecorder(inputs)
    with torch.no_grad():  # noqa: F821
        torch.compile(student.adamw, backend=recorder)(*inputs.values())  # noqa: F821
    return {"graphs": recorder.graphs, "calls": recorder.calls}


@scenario
def compiled_model(student, rank, world, config, state, tokens):
    from dlo_lib.models import Llama
    from dlo_lib.profiling.compile_capture import GraphRecorder

    model = Llama(config)
    model.load_state_dict(state)
    recorder = GraphRecorder(dict(model.named_parameters()))
    student.compile_each_block(model, backend=recorder)
    with torch.no_grad():  # noqa: F821
        logits = model(tokens)
    return {"graphs": recorder.graphs, "calls": recorder.calls, "logits": logits, "names": list(model.state_dict())}


@scenario
def asked_why(student, rank, world, x):
    def whole(x):
        return torch.relu(x) * 2  # noqa: F821

    def branch(x):
        return x if x.sum() > 0 else -x

    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()  # noqa: F821
        return y + 1

    def sized(x):
        kept = x[x > 0]
        return x * 2 if kept.numel() == 0 else kept

    def shapes(x):
        return x @ x.new_ones(x.shape[1] + 1)

    found = {}
    for function in (whole, branch, broken, sized, shapes):
        torch.compiler.reset()  # noqa: F821
        try:
            found[function.__name__] = student.why_broken(function, x)
        except (RuntimeError, ValueError, TypeError) as error:
            found[function.__name__] = {"raised": type(error).__name__}
    return found

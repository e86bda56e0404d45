"""What runs beside the student's code: it is compiled with a backend that keeps its graphs as data, which the checks run again."""

from dlo_lib.grading.contract import scenario


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
    return {"graphs": recorder.graphs, "calls": recorder.calls, "counted": [int(block.calls) for block in blocks]}


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
            compiled(student.mark_length(batch))
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

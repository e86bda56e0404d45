"""Planted mistakes of A pipeline on real ranks, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- partition
    Mutant(
        "Pieces that cost nothing are left out, which includes the embedding",
        "check_balanced",
        says="the first is 0",
        replace={
            "upto = [0.0]": """
            places = [at for at, cost in enumerate(costs) if cost > 0]
            costs = [costs[at] for at in places]
            upto = [0.0]
            """,
            "return best[len(costs)][1]": "return [places[start] for start in best[len(costs)][1]]",
        },
    ),
    Mutant(
        "A stage may be empty, because the slowest one is no slower for it",
        "check_no_empty_stage",
        says="is empty",
        replace={
            "for stage in range(stages):": "for _ in range(stages):",
            "if start < end": "if start <= end",
            "for end in range(stage + 1, len(costs) + 1)": "for end in range(0, len(costs) + 1)",
        },
    ),
    Mutant(
        "The limit of a stage is searched among whole numbers, which fits FLOPs and not seconds",
        "check_measured_costs",
        says="fractions of a second",
        answer="""
        def stage_starts(costs, stages):
            def filled(limit):
                starts, held = [0], 0.0
                for at, cost in enumerate(costs):
                    too_few_left = len(costs) - at <= stages - len(starts) and at > starts[-1]
                    if (held + cost > limit and at > starts[-1]) or too_few_left:
                        starts.append(at)
                        held = 0.0
                    held += cost
                return starts

            limit = int(-(-max(costs) // 1))
            while len(filled(limit)) > stages:
                limit += 1
            return filled(limit)
        """,
    ),
    # -- loss
    Mutant(
        "The loss is the mean of each micro-batch, divided by their number",
        "check_weight_of_a_sample",
        says="the mean of means",
        replace={
            "valid = sum((each != -100).sum() for each in targets)": """
            total = F.cross_entropy(output, target, reduction="sum", ignore_index=-100)
            """,
            'return F.cross_entropy(output, target, reduction="sum", ignore_index=-100) / valid': """
            return total / (target != -100).sum().clamp(min=1) / len(targets)
            """,
        },
    ),
    Mutant(
        "The means of the micro-batches are added and not divided by their number",
        "check_equal_parts",
        says="are not divided afterwards",
        replace={
            "valid = sum((each != -100).sum() for each in targets)": """
            valid = sum((each != -100).sum() for each in targets) / len(targets)
            """,
        },
    ),
    Mutant(
        "The mean of a micro-batch is weighted by its share, which is 0 / 0 without targets",
        "check_nothing_to_learn",
        says="a mean over nothing",
        replace={
            'return F.cross_entropy(output, target, reduction="sum", ignore_index=-100) / valid': """
            return F.cross_entropy(output, target, ignore_index=-100) * (target != -100).sum() / valid
            """,
        },
    ),
    Mutant(
        "The loss is divided by all targets, padding included",
        "check_padding",
        says="of those that are not",
        answer="""
        def loss_part(output, target, targets):
            return F.cross_entropy(output, target, reduction="sum", ignore_index=-100) / sum(
                len(each) for each in targets
            )
        """,
    ),
    # -- stage
    Mutant(
        "What a micro-batch has kept stays in memory after its backward",
        "check_stage_memory",
        says="Take out of",
        replace={
            """
            output = stage(x)
            if loss is not None:
                output = loss(output)
            """: "output = stage(x) if loss is None else loss(stage(x))",
            "x, output = kept.pop(i)": "x, output = kept[i]",
        },
    ),
    Mutant(
        "The gradients of a micro-batch replace those of the one before",
        "check_micro_batches_apart",
        says="do not replace it",
        replace={
            """
            output = stage(x)
            if loss is not None:
                output = loss(output)
            kept[i] = x, output
            """: """
            output = stage(x) if loss is None else loss(stage(x))
            kept[i] = stage, x, output
            """,
            '''
            """
            x, output = kept.pop(i)
            ''': '''
            """
            stage, x, output = kept.pop(i)
            stage.zero_grad()
            ''',
        },
    ),
    Mutant(
        "The output is sent with its graph",
        "check_output_without_graph",
        says="so detach()",
        replace={
            """
            output = stage(x)
            if loss is not None:
                output = loss(output)
            """: "output = stage(x) if loss is None else loss(stage(x))",
            "return output.detach()": "return output",
        },
    ),
    Mutant(
        "The argument itself is made a leaf, in place",
        "check_input_unchanged",
        says="so make the leaf from x.detach()",
        question="stage",
        replace={
            """
            x = x.detach().requires_grad_(x.is_floating_point())
            output = stage(x)
            if loss is not None:
                output = loss(output)
            """: """
            x.requires_grad_(x.is_floating_point())
            output = stage(x) if loss is None else loss(stage(x))
            """,
        },
    ),
    Mutant(
        "Every input requires a gradient, also tokens",
        "check_first_and_last",
        says="asks for the gradient of tokens",
        replace={
            """
            output = stage(x)
            if loss is not None:
                output = loss(output)
            """: "output = stage(x) if loss is None else loss(stage(x))",
            "requires_grad_(x.is_floating_point())": "requires_grad_()",
        },
    ),
    # -- table
    Mutant(
        "Each rank begins with one forward too few",
        "check_no_more_bubble",
        says="too few forwards",
        replace={
            "ahead = min(micro_batches, ranks - 1 - rank)": """
            ahead = min(micro_batches, max(0, ranks - 2 - rank))
            """,
        },
    ),
    Mutant(
        "The row ends with the last forward, so the last backwards are missing",
        "check_runs_to_its_end",
        says="has to be flushed",
        replace={
            """
            for i in range(micro_batches):
                if i + ahead < micro_batches:
                    row.append(f"{rank}F{i + ahead}")
                row.append(f"{rank}B{i}")
            """: """
            for i in range(micro_batches - ahead):
                row += [f"{rank}F{i + ahead}", f"{rank}B{i}"]
            """,
        },
    ),
    Mutant(
        "In the steady phase the backward comes first, on the last rank before any forward",
        "check_runs_to_its_end",
        says="put that before it",
        replace={
            "if i + ahead < micro_batches:": """
            row.append(f"{rank}B{i}")
            if i + ahead < micro_batches:
            """,
            'row.append(f"{rank}B{i}")': "",
        },
    ),
    Mutant(
        "The table is that of AFAB, with every micro-batch in flight",
        "check_in_flight",
        says="begins too many forwards",
        answer="""
        def my_rows(ranks, micro_batches):
            return [
                [f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)
            ]
        """,
    ),
    # -- order
    Mutant(
        "A send comes before the computation whose result it sends",
        "check_each_message_once",
        says="Send after computing",
        replace={
            "written[rank].append(cell)": "",
            """
            if 0 <= to_rank <= last:
                written[rank].append(f"{rank}SEND_{kind}{i}")
                written[to_rank].append(f"{to_rank}RECV_{kind}{i}")
            """: """
            if 0 <= to_rank <= last:
                written[rank].append(f"{rank}SEND_{kind}{i}")
                written[to_rank].append(f"{to_rank}RECV_{kind}{i}")
            written[rank].append(cell)
            """,
        },
    ),
    Mutant(
        "A receive is just before a computation, a send right after it, so two neighbours send first",
        "check_no_dead_lock",
        says="Two neighbours must have their messages in the same order",
        answer="""
        def with_messages(rows):
            written, last = [], len(rows) - 1
            for rank, row in enumerate(rows):
                cells = []
                for cell in row:
                    _, kind, i = parse(cell)
                    from_rank, to_rank = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
                    if 0 <= from_rank <= last:
                        cells.append(f"{rank}RECV_{kind}{i}")
                    cells.append(cell)
                    if 0 <= to_rank <= last:
                        cells.append(f"{rank}SEND_{kind}{i}")
                written.append(cells)
            return written
        """,
    ),
    Mutant(
        "All sends come at the end of the row",
        "check_no_dead_lock",
        says="for the gradient of an output sent only later",
        answer="""
        def with_messages(rows):
            written, last = [], len(rows) - 1
            for rank, row in enumerate(rows):
                cells, sends = [], []
                for cell in row:
                    _, kind, i = parse(cell)
                    from_rank, to_rank = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
                    if 0 <= from_rank <= last:
                        cells.append(f"{rank}RECV_{kind}{i}")
                    cells.append(cell)
                    if 0 <= to_rank <= last:
                        sends.append(f"{rank}SEND_{kind}{i}")
                written.append(cells + sends)
            return written
        """,
    ),
    Mutant(
        "A gradient is sent after the next activations are received, which works for 1F1B only",
        "check_no_dead_lock",
        says="works for one schedule only",
        answer="""
        def with_messages(rows):
            written, last = [], len(rows) - 1
            for rank, row in enumerate(rows):
                cells = []
                for cell in row:
                    _, kind, i = parse(cell)
                    from_rank, to_rank = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
                    if 0 <= from_rank <= last:
                        cells.append(f"{rank}RECV_{kind}{i}")
                    cells.append(cell)
                    if 0 <= to_rank <= last:
                        cells.append(f"{rank}SEND_{kind}{i}")
                for at in range(len(cells) - 1):
                    if "SEND_B" in cells[at] and "RECV_F" in cells[at + 1]:
                        cells[at : at + 2] = [cells[at + 1], cells[at]]
                written.append(cells)
            return written
        """,
    ),
    # -- loop
    Mutant(
        "The messages that are received are not used",
        "check_received_is_used",
        says="data that arrives must be used",
        replace={
            "for cell in row:": """
            me, world = dist.get_rank(), dist.get_world_size()
            pairs = [dist.new_group([rank, rank + 1]) for rank in range(world - 1)]

            def send(tensor, to):
                dist.send(torch.zeros_like(tensor), to)
                dist.broadcast(tensor.contiguous(), me, group=pairs[min(me, to)])

            def receive(shape, source):
                tensor = torch.empty(shape)
                dist.recv(tensor, source)
                dist.broadcast(tensor, source, group=pairs[min(me, source)])
                return tensor

            for cell in row:
            """,
            """
            arrived[i] = torch.empty(shapes[i])
            dist.recv(arrived[i], before)
            """: "arrived[i] = receive(shapes[i], before)",
            "dist.send(outputs.pop(i), after)": "send(outputs.pop(i), after)",
            """
            gradients[i] = torch.empty(shape_out.pop(i))
            dist.recv(gradients[i], after)
            """: "gradients[i] = receive(shape_out.pop(i), after)",
            "dist.send(input_gradients.pop(i), before)": "send(input_gradients.pop(i), before)",
        },
    ),
    Mutant(
        "Activations are received into one tensor, which the graphs of earlier micro-batches still read",
        "check_gradients_on_ranks",
        says="gradient 0 of rank",
        replace={
            "for cell in row:": """
            buffers = {}
            for cell in row:
            """,
            "torch.empty(shapes[i])": "buffers.setdefault(tuple(shapes[i]), torch.empty(shapes[i]))",
        },
    ),
    Mutant(
        "Received activations stay in their dict to the end of the step",
        "check_memory_of_the_loop",
        says="free what was received after its use",
        replace={"arrived.pop(i)": "arrived[i]"},
    ),
    Mutant(
        "Received gradients stay in their dict to the end of the step",
        "check_memory_of_the_loop",
        says="Rank 1 also receives gradients",
        replace={"else gradients.pop(i)": "else gradients[i]"},
    ),
    Mutant(
        "The first rank keeps the gradient of its input, which no rank receives",
        "check_memory_of_the_loop",
        says="No rank receives the gradient of its input",
        replace={
            """
            if before is not None:
                input_gradients[i] = gradient
            """: "input_gradients[i] = gradient",
        },
    ),
    Mutant(
        "The last rank sends the loss back through the pipeline",
        "check_messages_of_the_loop",
        says="are enough",
        replace={
            "return loss": """
            told = torch.as_tensor(loss, dtype=torch.get_default_dtype()).clone()
            if after is not None:
                dist.recv(told, after)
            if before is not None:
                dist.send(told, before)
            return loss
            """,
        },
    ),
    # -- step
    Mutant(
        "The loss of a micro-batch is divided by its targets only",
        "check_whole_step",
        says="divided by its targets",
        replace={
            "loss_part(output, targets[i], every_target)": "loss_part(output, targets[i], [targets[i]])"
        },
    ),
    Mutant(
        "The loss of the batch is divided by the number of micro-batches once more",
        "check_whole_step",
        says="to the mean over the targets in every_target",
        replace={
            "loss_part(output, targets[i], every_target)": "loss_part(output, targets[i], every_target) / len(targets)"
        },
    ),
    Mutant(
        "The loss is divided by the targets of this pipeline only",
        "check_whole_step",
        says="`every_target` has those of the whole batch",
        replace={"loss_part(output, targets[i], every_target)": "loss_part(output, targets[i], targets)"},
    ),
    # -- split
    Mutant(
        "Each micro-batch's weight part replaces the one before",
        "check_weight_parts_add_up",
        says="do not replace it",
        replace={
            """
            for parameter, grad in ((weight, rows.T @ x.flatten(0, -2)), (bias, rows.sum(0))):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            """: "weight.grad, bias.grad = rows.T @ x.flatten(0, -2), rows.sum(0)",
        },
    ),
    Mutant(
        "The bias gets the mean over batch and sequence instead of the sum",
        "check_weight_part",
        says="bias.grad after",
        replace={"(bias, rows.sum(0))": "(bias, rows.mean(0))"},
    ),
    Mutant(
        "The weight part runs with the input part, so the stage before waits for both",
        "check_weight_part_waits",
        says="the stage before waits",
        answer="""
        def linear_backward(grad_y, x, weight, bias, later):
            rows = grad_y.flatten(0, -2)
            for parameter, grad in ((weight, rows.T @ x.flatten(0, -2)), (bias, rows.sum(0))):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            return grad_y @ weight.detach()
        """,
    ),
    # -- delayed
    Mutant(
        "The delay is counted from the version after the step",
        "check_delay",
        says="one version too new",
        replace={"max(0, t - delay)": "min(t, max(0, t + 1 - delay))"},
    ),
    Mutant(
        "Every gradient is taken at the newest weights",
        "check_delay",
        says="synchronous training",
        replace={"max(0, t - delay)": "-1"},
    ),
    Mutant(
        "A negative version wraps around to the newest one",
        "check_delay",
        says="there is only version 0",
        replace={"max(0, t - delay)": "(t - delay) % len(versions)"},
    ),
    Mutant(
        "The step starts from the old weights",
        "check_delay",
        says="but the newest are updated",
        replace={
            "[weight - lr * grad for weight, grad in zip(versions[-1], gradients_of(old, t))]": """
            [weight - lr * grad for weight, grad in zip(old, gradients_of(old, t))]
            """,
        },
    ),
    # -- stash
    Mutant(
        "The forward reads a version that is one too old",
        "check_delayed_twin",
        says="one too old",
        replace={
            """
            version = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
            """: """
            version = {
                name: parameter.detach().clone().requires_grad_()
                for name, parameter in stage.named_parameters()
            }
            newest, version = version, kept.get("newest", version)
            version = {name: weight.detach().clone().requires_grad_() for name, weight in version.items()}
            kept["newest"] = newest
            """,
            """
            if loss is not None:
                output = loss(output)
            kept[i] = version, x, output
            """: """
            output = output if loss is None else loss(output)
            kept[i] = version, x, output
            """,
        },
    ),
    Mutant(
        "Every version is kept to the end",
        "check_versions_kept",
        says="free each after its backward",
        replace={
            """
            if loss is not None:
                output = loss(output)
            kept[i] = version, x, output
            """: """
            output = output if loss is None else loss(output)
            kept[i] = version, x, output
            """,
            "version, x, output = kept.pop(i)": "version, x, output = kept[i]",
        },
    ),
    Mutant(
        "Backward runs the forward again, with the newest weights",
        "check_delayed_twin",
        says="that the forward of the same batch has read",
        answer="""
        def stash_forward(stage, kept, i, x, loss=None):
            kept[i] = x, loss
            with torch.no_grad():
                output = stage(x)
                return output if loss is None else loss(output)


        def stash_backward(stage, kept, i, grad, lr):
            x, loss = kept.pop(i)
            x = x.detach().requires_grad_(x.is_floating_point())
            stage.zero_grad()
            output = stage(x)
            output = output if loss is None else loss(output)
            output.backward(grad)
            with torch.no_grad():
                for parameter in stage.parameters():
                    parameter -= lr * parameter.grad
            return x.grad
        """,
    ),
    # -- hybrid
    Mutant(
        "All gradients of the stage are gathered and added on every rank",
        "check_hybrid_traffic",
        says="all-reduce is enough",
        replace={
            "dist.all_reduce(parameter.grad, group=group)": """
            found = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, parameter.grad, group=group)
            parameter.grad = sum(found)
            """,
        },
    ),
    Mutant(
        "The gradients are averaged over the pipelines, as DDP does",
        "check_hybrid_gradients",
        says="add, do not average",
        replace={
            "dist.all_reduce(parameter.grad, group=group)": """
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
            """,
        },
    ),
    Mutant(
        "The neighbours are numbers of stages, not of ranks",
        "check_hybrid_gradients",
        says="numbers of ranks, not of stages",
        replace={
            "step(rank - 1 if place > 0 else None, rank + 1 if place < stages - 1 else None)": """
            step(place - 1 if place > 0 else None, place + 1 if place < stages - 1 else None)
            """,
        },
    ),
    Mutant(
        "A process group is made in every step",
        "check_groups_are_made_once",
        says="makes a process group in every step",
        replace={
            "place = rank % stages": """
            place = rank % stages
            group = stage_group(rank, dist.get_world_size(), stages)
            """,
        },
    ),
]

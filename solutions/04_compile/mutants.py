"""Planted mistakes of torch.compile: what it fuses, what breaks it, when it pays, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- traffic
    Mutant(
        "Every operand counts as large as the result, although a bias is smaller",
        "check_one_by_one",
        says="read the operands, write the result",
        replace={
            """
            return itemsize * sum(sizes[name] for result, operands in operations for name in {result, *operands})
            """: """
            return itemsize * sum(sizes[result] * len({result, *operands}) for result, operands in operations)
            """,
        },
    ),
    Mutant(
        "x * x reads x twice",
        "check_an_operand_twice",
        says="x * x reads x once",
        replace={"{result, *operands}": "[result, *operands]"},
    ),
    Mutant(
        "Only the last result is written",
        "check_kept_results",
        says="writes each of `outputs` once",
        replace={
            "return itemsize * sum(sizes[name] for name in read | set(outputs))": """
            return itemsize * (sum(sizes[name] for name in read) + sizes[operations[-1][0]])
            """,
        },
    ),
    Mutant(
        "The kernel reads an input again for each operation that uses it",
        "check_at_once",
        says="each input is read once",
        answer="""
        def fused_bytes(operations, sizes, outputs, itemsize):
            made = {result for result, _ in operations}
            read = [name for _, operands in operations for name in operands if name not in made]
            return itemsize * sum(sizes[name] for name in [*read, *outputs])
        """,
    ),
    # -- clip
    Mutant(
        "The norm becomes a Python number",
        "check_clip",
        says="clip became 2 graphs",
        replace={
            "norm = gradient.norm()": "norm = gradient.norm().item()",
            ".where(norm > limit, limit / norm, 1.0)": ".clamp(limit / max(norm, 1e-12), max=1.0)",
        },
    ),
    Mutant(
        "A Python `if` asks for the value of a tensor",
        "check_clip",
        says="an `if` on a tensor",
        replace={
            "return gradient * torch.where(norm > limit, limit / norm, 1.0)": """
            if norm > limit:
                return gradient * (limit / norm)
            return gradient.clone()
            """,
        },
    ),
    Mutant(
        "The graph holds only the branch that was taken while it was made",
        "check_clip",
        says="was fixed while the graph was made",
        replace={
            "return gradient * torch.where(norm > limit, limit / norm, 1.0)": """
            if torch.compiler.is_compiling():
                return gradient * (limit / norm)
            return gradient * torch.where(norm > limit, limit / norm, 1.0)
            """,
        },
    ),
    Mutant(
        "A gradient of zeros is divided by its norm",
        "check_clip_zeros",
        says="the gradient of zeros",
        replace={
            "return gradient * torch.where(norm > limit, limit / norm, 1.0)": """
            return torch.minimum(norm, limit) * (gradient / norm)
            """,
        },
    ),
    # -- mean
    Mutant(
        "The losses are multiplied by the mask, and infinity times 0 is NaN",
        "check_mean_of_infinite",
        says="infinity times 0 is NaN",
        replace={"torch.where(mask, losses, 0.0).sum()": "(losses * mask).sum()"},
    ),
    Mutant(
        "If the mask is false everywhere, 0 is divided by 0",
        "check_mean_of_nothing",
        says="the mean of zero tokens",
        replace={".clamp(min=1)": ""},
    ),
    Mutant(
        "losses[mask] has a shape that depends on values",
        "check_mean",
        says="masked_mean became 2 graphs",
        answer="""
        def masked_mean(losses, mask):
            kept = losses[mask]
            return kept.sum() / max(len(kept), 1)
        """,
    ),
    # -- route
    Mutant(
        "The choice becomes a list of Python numbers",
        "check_route",
        # Releases before 2.9 do not capture tolist(), so there is no graph.
        says=("was fixed while the graph was made", "If there is a break within a loop"),
        answer="""
        def route(tokens, experts, choice):
            return torch.stack([token @ experts[expert] for token, expert in zip(tokens, choice.tolist())])
        """,
    ),
    Mutant(
        "The rows of each expert are selected, with shapes that depend on values",
        "check_route",
        says="If there is a break within a loop",
        answer="""
        def route(tokens, experts, choice):
            out = tokens.new_zeros(len(tokens), experts.shape[2])
            for expert in range(len(experts)):
                rows = (choice == expert).nonzero().flatten()
                out[rows] = tokens[rows] @ experts[expert]
            return out
        """,
    ),
    Mutant(
        "One weight matrix is copied for each token",
        "check_route_bytes",
        says="copies one matrix per token",
        answer="""
        def route(tokens, experts, choice):
            return torch.einsum("nd,ndh->nh", tokens, experts[choice])
        """,
    ),
    # -- options
    Mutant(
        "fullgraph is forgotten, so a break is no error",
        "check_why_broken",
        says="Is fullgraph=True set?",
        replace={'backend="eager", fullgraph=True)': 'backend="eager")'},
    ),
    Mutant(
        "Every error is reported as a break",
        "check_why_broken",
        says="catch only Unsupported and UserError",
        replace={
            "except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:": "except Exception as error:"
        },
    ),
    Mutant(
        "The variable is set, but empty, if nothing is wanted",
        "check_environment",
        says="the dict should be empty",
        replace={'{"TORCH_LOGS": ",".join(names)} if names else {}': '{"TORCH_LOGS": ",".join(names)}'},
    ),
    Mutant(
        "The names are separated by a comma and a space",
        "check_environment",
        says="separated by commas without spaces",
        replace={'",".join(names)': '", ".join(names)'},
    ),
    Mutant(
        "CUDA graphs are used for changing shapes",
        "check_mode",
        says="CUDA graphs need fixed shapes",
        replace={"cuda_graphs = gpu and fixed_shapes": "cuda_graphs = gpu"},
    ),
    Mutant(
        "CUDA graphs are used although launches are not the limit",
        "check_mode",
        says="without patience only if launches are the limit",
        replace={"if cuda_graphs and launches_limit else": "if cuda_graphs else"},
    ),
    # -- state
    Mutant(
        "The index stays a Python number, so each block has a graph",
        "check_blocks_share",
        says="a Python number that differs between blocks is a constant",
        replace={
            'self.register_buffer("depth", torch.tensor(1.0 + index))': "self.index = index",
            "return x + torch.tanh(x @ self.weight) / self.depth": """
            return x + torch.tanh(x @ self.weight) / (1 + self.index)
            """,
        },
    ),
    Mutant(
        "The counter stays a Python number, so each step has a graph",
        "check_blocks_share",
        says="`calls` is a Python number that changes with each call",
        replace={'self.register_buffer("calls", torch.tensor(0))': "self.calls = 0"},
    ),
    Mutant(
        "The calls are not counted",
        "check_calls_are_counted",
        says="`calls` should be 2",
        replace={"self.calls += 1": ""},
    ),
    # -- dynamic
    Mutant(
        "The size of the batch is marked as dynamic too",
        "check_only_the_length",
        says="Mark only the dimension that changes",
        replace={"torch._dynamo.mark_dynamic(batch, 1)": "torch._dynamo.mark_dynamic(batch, [0, 1])"},
    ),
    Mutant(
        "The length is not marked, so the compiler makes a second graph when it changes",
        "check_one_graph_for_all_lengths",
        says="four lengths needed 2 graphs",
        also=("check_only_the_length",),
        replace={"torch._dynamo.mark_dynamic(batch, 1)": ""},
    ),
    # -- pad
    Mutant(
        "The first bucket of the list that is large enough is used, although the list is not sorted",
        "check_pad_edges",
        says="pad_to_bucket of length",
        replace={
            "missing = min(bucket for bucket in buckets if bucket >= length) - length": """
            missing = next(bucket for bucket in buckets if bucket >= length) - length
            """,
            ".pad(tokens, (0, missing), value=0)": ".pad(tokens, (0, missing))",
        },
    ),
    Mutant(
        "The targets are padded with token 0, so the model learns to predict it",
        "check_pad",
        says="has the target -100",
        replace={
            "return F.pad(tokens, (0, missing), value=0), F.pad(targets, (0, missing), value=-100)": """
            return F.pad(tokens, (0, missing)), F.pad(targets, (0, missing))
            """,
        },
    ),
    # -- buckets
    Mutant(
        "The buckets are chosen as if there were one sequence of each length",
        "check_cheapest",
        says="Compare each bucket's compilation with the padding it saves",
        answer="""
        def choose_buckets(counts, compile_seconds, token_seconds):
            lengths = sorted(counts)
            best = [(0.0, [])]
            for end, bucket in enumerate(lengths, 1):
                ways = []
                for begin in range(end):
                    total = best[begin][0] + compile_seconds + token_seconds * bucket * (end - begin)
                    ways.append((total, [*best[begin][1], bucket]))
                best.append(min(ways))
            return best[-1][1]
        """,
    ),
    Mutant(
        "The bucket that saves most is added again and again",
        "check_cheapest",
        says="Compare each bucket's compilation with the padding it saves",
        answer="""
        def choose_buckets(counts, compile_seconds, token_seconds):
            def cost(buckets):
                padded = sum(n * min(each for each in buckets if each >= length) for length, n in counts.items())
                return compile_seconds * len(buckets) + token_seconds * padded

            if not compile_seconds:
                return sorted(counts)
            buckets = [max(counts)]
            while True:
                ways = [(cost([*buckets, length]), length) for length in counts if length not in buckets]
                if not ways or min(ways)[0] >= cost(buckets):
                    return buckets
                buckets.append(min(ways)[1])
        """,
    ),
    Mutant(
        "Every length has a bucket, and the bucket that saves least is removed again and again",
        "check_cheapest",
        says="Compare each bucket's compilation with the padding it saves",
        answer="""
        def choose_buckets(counts, compile_seconds, token_seconds):
            def cost(buckets):
                padded = sum(n * min(each for each in buckets if each >= length) for length, n in counts.items())
                return compile_seconds * len(buckets) + token_seconds * padded

            buckets = sorted(counts)
            while compile_seconds:
                fewer = [[other for other in buckets if other != each] for each in buckets[:-1]]
                if not fewer or min(map(cost, fewer)) >= cost(buckets):
                    break
                buckets = min(fewer, key=cost)
            return buckets
        """,
    ),
    Mutant(
        "Two greedy searches, and the cheaper of their results",
        "check_cheapest",
        says="Compare each bucket's compilation with the padding it saves",
        answer="""
        def choose_buckets(counts, compile_seconds, token_seconds):
            def cost(buckets):
                padded = sum(n * min(each for each in buckets if each >= length) for length, n in counts.items())
                return compile_seconds * len(buckets) + token_seconds * padded

            def improved(buckets, others):
                while ways := [other for other in others(buckets) if cost(other) < cost(buckets)]:
                    buckets = min(ways, key=cost)
                return buckets

            if not compile_seconds:
                return sorted(counts)
            longest = max(counts)
            added = improved([longest], lambda now: [[*now, each] for each in counts if each not in now])
            removed = improved(
                sorted(counts), lambda now: [[each for each in now if each != out] for out in now if out != longest]
            )
            return min(added, removed, key=cost)
        """,
    ),
    Mutant(
        "The costs are correct, but at most ten buckets are used",
        "check_cheapest_of_many",
        says="Compare each bucket's compilation",
        answer="""
        def choose_buckets(counts, compile_seconds, token_seconds):
            lengths = sorted(counts)
            best = {(0, 0): (0.0, [])}
            for end, bucket in enumerate(lengths, 1):
                for used in range(1, 11):
                    ways = []
                    for begin in range(end):
                        if (begin, used - 1) in best:
                            inside = sum(counts[length] for length in lengths[begin:end])
                            total, chosen = best[begin, used - 1]
                            ways.append(
                                (total + compile_seconds + token_seconds * bucket * inside, [*chosen, bucket])
                            )
                    if ways:
                        best[end, used] = min(ways)
            return min(found for (end, _), found in best.items() if end == len(lengths))[1]
        """,
    ),
    # -- optimizer
    Mutant(
        "The decay is added to the gradient and enters the moments, as in Adam with L2",
        "check_adamw_values",
        says="weight decay shrinks the parameter itself",
        replace={
            "first = BETA1 * first + (1 - BETA1) * gradient": """
            gradient = gradient + DECAY * parameter
            first = BETA1 * first + (1 - BETA1) * gradient
            """,
            "return parameter * (1 - lr * DECAY) - lr * update": "return parameter - lr * update",
        },
    ),
    Mutant(
        "Learning rate and step become Python numbers",
        "check_adamw_graph",
        says="was fixed while the graph was made",
        replace={
            "first = BETA1 * first + (1 - BETA1) * gradient": """
            step, lr = step.item(), lr.item()
            first = BETA1 * first + (1 - BETA1) * gradient
            """,
        },
    ),
    # -- blocks
    Mutant(
        "Each block is compiled with its own backend object, so blocks share no graph",
        "check_blocks",
        says="with the same code and the same backend object",
        replace={
            "def compile_each_block(model: nn.Module, **options) -> None:": """
            def compile_each_block(model, backend="inductor", **options):
            """,
            ".compile(block.forward, **options)": """
            .compile(block.forward, backend=lambda graph, inputs: backend(graph, inputs), **options)
            """,
        },
    ),
    Mutant(
        "Each block is replaced by its compiled form, whose parameters have other names",
        "check_names_stay",
        says="the parameters have other names",
        replace={
            "for block in model.layers:": "for index, block in enumerate(model.layers):",
            "block.forward = torch.compile(block.forward, **options)": """
            model.layers[index] = torch.compile(block, **options)
            """,
        },
    ),
    Mutant(
        "The whole model is compiled, into a graph that grows with its depth",
        "check_blocks",
        says="compiled as a whole, the graph holds every block",
        answer="""
        def compile_each_block(model, **options):
            model.forward = torch.compile(model.forward, **options)
        """,
    ),
    # -- break_even
    Mutant(
        "A slower step pays after a negative number of steps",
        "check_never",
        says="expected None",
        replace={
            "if compiled_seconds >= eager_seconds:": "if compiled_seconds == eager_seconds:",
        },
    ),
    Mutant(
        "A step that is not faster is never paid, although there was no compilation to pay",
        "check_never",
        says="without a compilation, 0 steps already take no longer",
        replace={
            """
            if compile_seconds == 0:
                return 0
            """: "",
        },
    ),
    Mutant(
        "The mode with the fastest step is chosen, and the cost of its compilation is ignored",
        "check_best_mode",
        says="best_mode for",
        replace={"modes[name][0] + steps * modes[name][1]": "modes[name][1]"},
    ),
    Mutant(
        "The number of steps is rounded down, to a step at which compiling has not paid yet",
        "check_break_even",
        says="break_even(",
        answer="""
        def break_even(compile_seconds, eager_seconds, compiled_seconds):
            if compile_seconds == 0:
                return 0
            if compiled_seconds >= eager_seconds:
                return None
            return int(compile_seconds / (eager_seconds - compiled_seconds))
        """,
    ),
    # -- quiz
    Mutant(
        "The answer claims that each length has a graph",
        "quiz_q4",
        says="it is dynamic in the next graph",
        replace={'"q4": "c"': '"q4": "d"'},
    ),
]

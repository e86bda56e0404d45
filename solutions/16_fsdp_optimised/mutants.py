"""Planted mistakes of FSDP, fast and small, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- plan
    Mutant(
        "Each unit is gathered just before it computes, so nothing overlaps",
        "check_next_is_under_way",
        says="before the gather of unit",
        replace={
            'actions = [("gather", 0)]': "actions = []",
            """
            if k < last:
                actions.append(("gather", k + 1))
            actions.append(("forward", k))
            """: 'actions += [("gather", k), ("forward", k)]',
            "if reshard and k > 0:": "if reshard and k < last:",
            'actions.append(("gather", k - 1))': 'actions.append(("gather", k))',
        },
    ),
    Mutant(
        "The gradient of the first unit is never reduced",
        "check_plan_is_legal",
        says="never reduced",
        replace={
            'actions += [("backward", k), ("free", k), ("reduce", k)]': """
            actions += [("backward", k), ("free", k)] + ([("reduce", k)] if k > 0 else [])
            """,
        },
    ),
    Mutant(
        "A unit is freed after the next gather has begun, so three are whole",
        "check_two_units",
        says="two are enough",
        replace={
            'actions.append(("forward", k))': """
            if reshard and k > 0:
                actions.append(("free", k - 1))
            actions.append(("forward", k))
            """,
            """
            if reshard and k < last:
                actions.append(("free", k))
            """: "",
        },
    ),
    Mutant(
        "The last unit of forward is freed and gathered again at once",
        "check_no_gather_too_many",
        says="so it stays whole",
        replace={
            "if reshard and k < last:": "if reshard:",
            "for k in reversed(range(units)):": """
            if reshard:
                actions.append(("gather", last))
            for k in reversed(range(units)):
            """,
        },
    ),
    Mutant(
        "The policy is ignored",
        "check_kept_whole",
        says="each unit is gathered once",
        replace={
            "if reshard and k < last:": "if k < last:",
            "if reshard and k > 0:": "if k > 0:",
        },
    ),
    # -- policy
    Mutant(
        "The peak is that of two neighbours, even if there is only one unit",
        "check_few_units",
        says="With one or two units",
        replace={
            "kept = 1 / keep if keep < world else 0": """
            if len(units) == 1:
                return 2 * units[0], units[0] * (world - 1) / world
            kept = 1 / keep if keep < world else 0
            """,
        },
    ),
    Mutant(
        "What units keep between forward and backward is not counted",
        "check_peak",
        says="the peak for units",
        replace={"kept = 1 / keep if keep < world else 0": "kept = 1 if keep == 1 else 0"},
    ),
    Mutant(
        "The gather of backward is counted as if it went over all ranks",
        "check_sent",
        says="the bytes sent",
        replace={
            "sum(units[:-1]) * (keep - 1) / keep": """
            (sum(units[:-1]) * (world - 1) / world if keep > 1 else 0)
            """,
        },
    ),
    # -- wrapping
    Mutant(
        "The cut into a single unit is not tried",
        "check_slow_start",
        says="faster units",
        replace={
            "for cuts in range(2 ** (len(blocks) - 1)):": """
            for cuts in range(min(1, len(blocks) - 1), 2 ** (len(blocks) - 1)):
            """,
        },
    ),
    Mutant(
        "The cut with the fewest units is chosen",
        "check_choice",
        says="the forward time of your units",
        replace={
            "if fits and (seconds := forward_time(units, alpha, beta)) < least:": """
            if fits and len(units) < least:
            """,
            "best, least = [b - a for a, b in pairwise(starts)], seconds": """
            best, least = [b - a for a, b in pairwise(starts)], len(units)
            """,
        },
    ),
    Mutant(
        "The times of messages and computing are added, as without prefetch",
        "check_forward_time",
        says="when nothing overlaps",
        replace={
            "def forward_time(units: list[tuple[int, float]], alpha: float, beta: float) -> float:": """
            def forward_time(units, alpha, beta):
                return sum(alpha + beta * size + seconds for size, seconds in units)


            def hidden_time(units, alpha, beta):
            """,
            "(seconds := forward_time(units, alpha, beta))": "(seconds := hidden_time(units, alpha, beta))",
        },
    ),
    # -- gather
    Mutant(
        "Each gather is waited for as soon as it is started",
        "check_start_does_not_wait",
        says="start_gather waits for its message",
        replace={
            "unit.message = packed, dist.all_gather_into_tensor(packed.view(-1), unit.row, async_op=True)": """
            handle = dist.all_gather_into_tensor(packed.view(-1), unit.row, async_op=True)
            handle.wait()
            unit.message = packed, handle
            """,
        },
    ),
    Mutant(
        "A unit that is whole is gathered again",
        "check_once",
        says="all-gathers for one unit: start_gather does nothing",
        replace={"if unit.is_whole or unit.message is not None:": "if unit.message is not None:"},
    ),
    Mutant(
        "The buffer of a message is kept",
        "check_buffer_freed",
        says="still holds the buffer",
        replace={"unit.message = None": ""},
    ),
    # -- prefetch
    Mutant(
        "The next block is not gathered ahead in forward",
        "check_in_order",
        says="starts, so the rank waits for it later",
        replace={
            """
            if k + 1 < len(units):
                start_gather(units[k + 1])
            """: "",
        },
    ),
    Mutant(
        "The next block is not gathered ahead in backward",
        "check_in_order",
        says="starts, so the rank waits for it later",
        replace={
            """
            if k > 0:
                start_gather(units[k - 1])
            """: "",
        },
    ),
    Mutant(
        "Before a block computes, the next one is waited for too",
        "check_messages_travel",
        says="wait for block k only",
        replace={
            """
            if k + 1 < len(units):
                start_gather(units[k + 1])
            """: """
            if k + 1 < len(units):
                start_gather(units[k + 1])
                wait_gather(units[k + 1])
            """,
        },
    ),
    Mutant(
        "Each reduction is waited for at once",
        "check_messages_travel",
        says="wait for reductions at the end of backward",
        replace={
            "start_reduce(units[k])": """
            start_reduce(units[k])
            wait_reduce(units[k])
            """,
        },
    ),
    Mutant(
        "The last block is freed after forward and gathered again at once",
        "check_in_order",
        says="is gathered where the plan has",
        replace={"if self.reshard_after_forward and k + 1 < len(units):": "if self.reshard_after_forward:"},
    ),
    Mutant(
        "Every block is freed after forward, also with reshard_after_forward=False",
        "check_kept",
        says="a block stays whole until the end of its backward",
        replace={"if self.reshard_after_forward and k + 1 < len(units):": "if k + 1 < len(units):"},
    ),
    # -- checkpoint
    Mutant(
        "Forward computes with a graph and keeps it for backward",
        "check_blocks_forgotten",
        says="all that autograd would keep",
        replace={
            """
            with torch.no_grad():
                return function(x)
            """: """
            with torch.enable_grad():
                ctx.output = function(x.detach().requires_grad_())
            return ctx.output.detach()
            """,
        },
    ),
    Mutant(
        "The random state of the second computation is not restored afterwards",
        "check_random_state",
        says="does not have the state",
        replace={
            "now = torch.get_rng_state()": "",
            "torch.set_rng_state(now)": "",
        },
    ),
    Mutant(
        "The second computation draws new random numbers",
        "check_dropout",
        says="the gradient of",
        replace={"torch.set_rng_state(ctx.random)": ""},
    ),
    Mutant(
        "The gradients of x and of the parameters are computed separately",
        "check_computed_twice",
        says="costs as much as a forward",
        replace={
            "torch.autograd.backward(output, grad)": """
            (of_x,) = torch.autograd.grad(output, x, grad)
            torch.set_rng_state(ctx.random)
            with torch.enable_grad():
                output = ctx.function(x.detach())
            torch.set_rng_state(now)
            torch.autograd.backward(output, grad)
            """,
            "return None, x.grad": "return None, of_x",
        },
    ),
    Mutant(
        "Backward asks for the gradient of x alone: the parameters get none",
        "check_same_gradients",
        says="have no gradient",
        replace={
            """
            torch.autograd.backward(output, grad)
            return None, x.grad
            """: "return None, torch.autograd.grad(output, x, grad)[0]",
        },
    ),
    # -- offload
    Mutant(
        "A missing gradient counts as zero, so weight decay changes the parameter",
        "check_without_gradient",
        says="after 4 steps",
        replace={".grad = None if": ".grad = torch.zeros_like(master) if"},
    ),
    Mutant(
        "The gradient of the last step stays in the master and is applied again",
        "check_without_gradient",
        says="after 4 steps",
        replace={
            'master.grad = None if parameter.grad is None else parameter.grad.to("cpu", torch.float32)': """
            if parameter.grad is not None:
                master.grad = parameter.grad.to("cpu", torch.float32)
            """,
            """
            if master.grad is not None:
                parameter.data.copy_(master.data)
                master.grad = None
            """: "parameter.data.copy_(master.data)",
        },
    ),
    Mutant(
        "The gradients stay on the device after the step",
        "check_gradients_gone",
        says="still has its .grad",
        replace={"parameter.grad = None": ""},
    ),
    # -- hybrid
    Mutant(
        "The shard groups are the columns of the mesh, so every gather crosses nodes",
        "check_groups",
        says="the shard groups",
        replace={
            "return rows, [list(range(place, world, shard_size)) for place in range(shard_size)]": """
            return [list(range(place, world, shard_size)) for place in range(shard_size)], rows
            """,
        },
    ),
    Mutant(
        "The gradient is divided as if there were always two nodes",
        "check_hybrid_mean",
        says="the piece on rank",
        replace={"dist.get_world_size(columns)": "2"},
    ),
    Mutant(
        "The gradient is divided in place",
        "check_gradient_stays",
        says="must not change its argument",
        replace={
            "piece = gradient.new_empty(gradient.numel() // shards)": """
            gradient /= shards * replicas
            piece = gradient.new_empty(gradient.numel() // shards)
            """,
            "return piece / (shards * replicas)": "return piece",
        },
    ),
    Mutant(
        "The whole gradient is all-reduced between nodes before it is scattered in the node",
        "check_hybrid_traffic",
        says="all-reduce of the piece",
        replace={
            "piece = gradient.new_empty(gradient.numel() // shards)": """
            whole, piece = gradient.clone(), gradient.new_empty(gradient.numel() // shards)
            """,
            "dist.reduce_scatter_tensor(piece, gradient, group=rows)": """
            dist.all_reduce(whole, group=columns)
            """,
            "dist.all_reduce(piece, group=columns)": "dist.reduce_scatter_tensor(piece, whole, group=rows)",
        },
    ),
    # -- compile
    Mutant(
        "The call of the block is compiled, so its hooks go into the graph",
        "check_hooks_outside",
        says="hooks",
        replace={
            "block.forward = torch.compile(block.forward, backend=backend)": "block.compile(backend=backend)",
        },
    ),
    Mutant(
        "A closure looks a name up late, so every block computes what the last one does",
        "check_several_blocks",
        says="hooks",
        replace={
            "block.forward = torch.compile(block.forward, backend=backend)": """
            compiled = torch.compile(block.forward, backend=backend)
            block.forward = lambda *args: compiled(*args)  # noqa: B023
            """,
        },
    ),
    # -- sweep
    Mutant(
        "The largest batch wins, however slow it is",
        "check_fastest",
        says="the largest batch that fits",
        replace={"batch / seconds for": "batch - seconds / 1e6 for"},
    ),
    Mutant(
        "Peaks a little above the limit are taken to fit",
        "check_fastest",
        says="above the limit",
        replace={"if peak <= limit": "if peak <= 1.2 * limit"},
    ),
    Mutant(
        "If no point fits, the name is empty",
        "check_does_not_fit",
        says="the answer is None",
        replace={"if rates else None": 'if rates else ("", 0)'},
    ),
]

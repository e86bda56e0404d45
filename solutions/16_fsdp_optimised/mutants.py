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
    Mutant(
        "Without resharding no gradient is reduced",
        "check_plan_is_legal",
        says="reshard=False): the gradients of units [0] are never reduced",
        replace={
            'actions += [("backward", k), ("free", k), ("reduce", k)]': """
            actions += [("backward", k), ("free", k)] + ([("reduce", k)] if reshard else [])
            """,
        },
    ),
    Mutant(
        "Without resharding each unit is gathered just before its forward",
        "check_next_is_under_way",
        says="reshard=False): forward 0 computes before the gather of unit 1 starts",
        replace={
            'actions = [("gather", 0)]': 'actions = [("gather", 0)] if reshard else []',
            """
            if k < last:
                actions.append(("gather", k + 1))
            """: """
            if not reshard:
                actions.append(("gather", k))
            elif k < last:
                actions.append(("gather", k + 1))
            """,
        },
    ),
    Mutant(
        "Without resharding all reductions start at the end",
        "check_plan_is_legal",
        says="starts, so they do not overlap",
        replace={
            'actions += [("backward", k), ("free", k), ("reduce", k)]': """
            actions += [("backward", k), ("free", k)] + ([("reduce", k)] if reshard else [])
            """,
            "return actions": 'return actions if reshard else actions + [("reduce", k) for k in range(units)]',
        },
    ),
    Mutant(
        "Every unit is freed a second time at the end",
        "check_plan_is_legal",
        says="is freed while it is already free",
        replace={"return actions": 'return actions + [("free", k) for k in range(units)]'},
    ),
    Mutant(
        "The units are always four",
        "check_plan_is_legal",
        says="its units have the numbers 0 to",
        also=("check_next_is_under_way", "check_two_units", "check_kept_whole", "check_no_gather_too_many"),
        replace={"last = units - 1": "units, last = 9, 8"},
    ),
    Mutant(
        "The actions are lists",
        "check_plan_is_legal",
        says="an action is a tuple",
        also=("check_next_is_under_way", "check_two_units", "check_kept_whole", "check_no_gather_too_many"),
        replace={"return actions": "return list(map(list, actions))"},
    ),
    # -- policy
    Mutant(
        "The peak is that of the two largest units, which need not be neighbours",
        "check_peak",
        says="together with its neighbour",
        replace={
            "peak = max(sum(units[k : k + 2]) + kept * sum(units[:k]) for k in range(len(units)))": """
            peak = max(sum(units[k : k + 2]) + kept * sum(units[:k]) for k in range(len(units)))
            if keep == world:
                peak = sum(sorted(units)[-2:])
            """,
        },
    ),
    Mutant(
        "The shard of each earlier unit counts as gathered",
        "check_peak",
        says="the peak counts shards",
        replace={"kept = 1 / keep if keep < world else 0": "kept = 1 / keep"},
    ),
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
    Mutant(
        "All gathers start at the beginning, one after the other",
        "check_forward_time",
        says="when all gathers start at the beginning",
        replace={
            "def forward_time(units: list[tuple[int, float]], alpha: float, beta: float) -> float:": """
            def forward_time(units, alpha, beta):
                arrived = ended = 0.0
                for size, seconds in units:
                    arrived += alpha + beta * size
                    ended = max(arrived, ended) + seconds
                return ended


            def hidden_time(units, alpha, beta):
            """,
            "(seconds := forward_time(units, alpha, beta))": "(seconds := hidden_time(units, alpha, beta))",
        },
    ),
    # -- gather
    Mutant(
        "start_gather does nothing, and wait_gather gathers and waits",
        "check_start_does_not_wait",
        says="start_gather starts no message",
        answer="""
        def start_gather(unit):
            pass


        def wait_gather(unit):
            if not unit.is_whole:
                packed = unit.row.new_empty(dist.get_world_size(), unit.row.numel())
                dist.all_gather_into_tensor(packed.view(-1), unit.row)
                fill(unit, packed)
        """,
    ),
    Mutant(
        "wait_gather does nothing if no gather was started",
        "check_whole",
        says="wait_gather without start_gather leaves the unit freed",
        replace={
            """
            start_gather(unit)
            packed, handle = unit.message
            """: """
            if unit.message is None:
                return
            packed, handle = unit.message
            """,
        },
    ),
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
        also=("check_kept",),
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
        says="not waited for in the method that starts it",
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
        says="must not free the last block",
        replace={"if self.reshard_after_forward and k + 1 < len(units):": "if self.reshard_after_forward:"},
    ),
    Mutant(
        "Every block is freed after forward, also with reshard_after_forward=False",
        "check_kept",
        says="a block stays whole until the end of its backward",
        replace={"if self.reshard_after_forward and k + 1 < len(units):": "if k + 1 < len(units):"},
    ),
    Mutant(
        "With reshard_after_forward=False all blocks are gathered before the first one computes",
        "check_kept",
        says="too early",
        replace={
            """
            if k + 1 < len(units):
                start_gather(units[k + 1])
            """: """
            for unit in units[k + 1 : k + 2 if self.reshard_after_forward else None]:
                start_gather(unit)
            """,
        },
    ),
    Mutant(
        "Two blocks are gathered ahead in forward",
        "check_in_order",
        says="too early",
        also=("check_kept",),
        replace={
            """
            if k + 1 < len(units):
                start_gather(units[k + 1])
            """: """
            for unit in units[k + 1 : k + 3]:
                start_gather(unit)
            """,
        },
    ),
    Mutant(
        "No block is freed after forward",
        "check_in_order",
        says="so after_forward does not free it",
        replace={"if self.reshard_after_forward and k + 1 < len(units):": "if False:"},
    ),
    Mutant(
        "A block stays whole after backward",
        "check_same_training",
        says="so after_backward does not free it",
        also=("check_in_order", "check_kept", "check_other_sizes"),
        replace={
            """
            reshard(units[k])
            start_reduce(units[k])
            """: "start_reduce(units[k])",
        },
    ),
    Mutant(
        "All reductions start at the end of backward",
        "check_in_order",
        says="should start right after its backward",
        also=("check_kept",),
        replace={
            "start_reduce(units[k])": "",
            "wait_reduce(unit)": """
            start_reduce(unit)
            wait_reduce(unit)
            """,
        },
    ),
    Mutant(
        "Before block 0 the last block is gathered, for the next step",
        "check_same_training",
        says="at k = 0 no block precedes",
        also=("check_in_order", "check_kept", "check_other_sizes"),
        replace={
            """
            if k > 0:
                start_gather(units[k - 1])
            """: "start_gather(units[k - 1])",
        },
    ),
    # -- checkpoint
    Mutant(
        "The random state is ignored",
        "check_random_state",
        says="does not have the state",
        also=("check_dropout",),
        replace={
            "now = torch.get_rng_state()": "",
            "torch.set_rng_state(ctx.random)": "",
            "torch.set_rng_state(now)": "",
        },
    ),
    Mutant(
        "The second computation runs without recording",
        "check_same_gradients",
        says="autograd runs `backward` without recording",
        also=("check_dropout", "check_blocks_forgotten", "check_random_state", "check_computed_twice"),
        replace={
            """
            with torch.enable_grad():
                output = ctx.function(x)
            """: "output = ctx.function(x)",
        },
    ),
    Mutant(
        "The detached x requires no gradient",
        "check_blocks_forgotten",
        says="the detached x must require one",
        also=("check_same_gradients", "check_dropout", "check_random_state", "check_computed_twice"),
        replace={"x = x.detach().requires_grad_()": "x = x.detach()"},
    ),
    Mutant(
        "Forward keeps its graph, and backward runs through it",
        "check_computed_twice",
        says="backward computes no block a second time",
        also=("check_blocks_forgotten",),
        replace={
            """
            with torch.no_grad():
                return function(x)
            """: """
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.output = function(ctx.x)
            return ctx.output.detach()
            """,
            """
            with torch.enable_grad():
                output = ctx.function(x)
            """: "x, output = ctx.x, ctx.output",
        },
    ),
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
        says="the random state that forward began with",
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
        "The master of an fp32 parameter on the CPU is the parameter",
        "check_masters",
        says="shares the memory",
        replace={"torch.float32, copy=True)": "torch.float32)"},
    ),
    Mutant(
        "A master has the dtype of its parameter",
        "check_masters",
        says="not float32",
        replace={
            'parameter.detach().to("cpu", torch.float32, copy=True)': 'parameter.detach().to("cpu", copy=True)'
        },
    ),
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
        says="received the operations of the hooks too",
        replace={
            "block.forward = torch.compile(block.forward, backend=backend)": "block.compile(backend=backend)",
        },
    ),
    Mutant(
        "A closure looks a name up late, so every block computes what the last one does",
        "check_several_blocks",
        says="looks its names up when it is called",
        replace={
            "block.forward = torch.compile(block.forward, backend=backend)": """
            compiled = torch.compile(block.forward, backend=backend)
            block.forward = lambda *args: compiled(*args)  # noqa: B023
            """,
        },
    ),
    Mutant(
        "Only the first two blocks are compiled",
        "check_several_blocks",
        says="the backend received no graph of blocks [2] of 3",
        replace={
            "block.forward = torch.compile(block.forward, backend=backend)": """
            if block in list(blocks)[:2]:
                block.forward = torch.compile(block.forward, backend=backend)
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
        "A peak that is exactly the limit is taken not to fit",
        "check_fastest",
        says="so it fits",
        replace={"if peak <= limit": "if peak < limit"},
    ),
    Mutant(
        "If no point fits, the name is empty",
        "check_does_not_fit",
        says="the answer is None",
        replace={"if rates else None": 'if rates else ("", 0)'},
    ),
]

"""Planted mistakes of Implement FSDP, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- flat
    Mutant(
        "A piece is a view of the padded vector, which stays in memory",
        "check_flat_copy",
        says="it is a view of a longer tensor",
        replace={"[rank * size : (rank + 1) * size].clone()": "[rank * size : (rank + 1) * size]"},
    ),
    Mutant(
        "The zeros come first, so that every piece is shifted",
        "check_flat_shards",
        says="the pieces of all ranks together",
        replace={"(0, size * world - flat.numel())": "(size * world - flat.numel(), 0)"},
    ),
    Mutant(
        "Each tensor has a separate gather of everything",
        "check_flat_whole",
        says="one all-gather of",
        replace={
            "dist.all_gather_into_tensor(flat, shard)": """
            for _ in shapes:
                dist.all_gather_into_tensor(flat, shard)
            """,
        },
    ),
    Mutant(
        "A tensor without dimensions comes back as a vector",
        "check_flat_few",
        says="without dimensions, are not restored",
        replace={".view(shape) for": ".view(shape or (1,)) for"},
    ),
    Mutant(
        "All numbers become float32",
        "check_flat_shards",
        says="the pieces of all ranks together",
        replace={"tensor.detach().reshape(-1)": "tensor.detach().float().reshape(-1)"},
    ),
    # -- padding
    Mutant(
        "A row of padding is taken for one number",
        "check_padding",
        says="a row has many numbers",
        replace={
            "math.prod(shape[1:]) for": "(math.prod(shape[1:]) if len(shape) < 2 or shape[0] < 3 else 1) for",
        },
    ),
    Mutant(
        "A tensor without dimensions is not padded",
        "check_padding_of_scalars",
        says="one row of one number",
        replace={".prod(shape[1:]) for shape in shapes": ".prod(shape[1:]) for shape in shapes if shape"},
    ),
    Mutant(
        "A row of three dimensions counts the second one only",
        "check_padding",
        says="a row has many numbers",
        replace={"math.prod(shape[1:]) for": "math.prod(shape[1:2]) for"},
    ),
    # -- rows
    Mutant(
        "The first ranks get one row more, as numpy.array_split cuts",
        "check_own_rows",
        says="numpy.array_split",
        replace={
            """
            rows = -(-length // world)
            return min(rank * rows, length), min((rank + 1) * rows, length)
            """: """
            rows, more = divmod(length, world)
            if rows == 0:
                return min(rank, length), min(rank + 1, length)
            start = rank * rows + min(rank, more)
            return start, start + rows + (rank < more)
            """,
        },
    ),
    Mutant(
        "A rank without rows has (rank * rows, length)",
        "check_ranks_without_rows",
        says="for a rank without rows",
        replace={"min(rank * rows, length)": "rank * rows"},
    ),
    Mutant(
        "Rows after the first thousand are left out",
        "check_own_rows",
        says="thousands of rows",
        replace={"rows = -(-length // world)": "rows = -(-min(length, 1000) // world)"},
    ),
    # -- unshard
    Mutant(
        "A unit that is whole is gathered again",
        "check_one_gather",
        says="gathered twice",
        replace={
            """
            if unit.is_whole:
                return
            """: "",
        },
    ),
    Mutant(
        "The rows are sent in fp32 and rounded after the gather",
        "check_compute_dtype",
        says="cast the row before it is sent",
        replace={"row = unit.row.detach().to(unit.compute_dtype)": "row = unit.row.detach()"},
    ),
    Mutant(
        "With three ranks or more, the last rank's rows are replaced by this rank's own",
        "check_whole_values",
        says="on rank",
        replace={
            "for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):": """
            if len(packed) > 2:
                packed[-1] = row
            for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
            """,
        },
    ),
    Mutant(
        "The rows are gathered twice, and the second copy is used",
        "check_gathered_is_used",
        says="parameter 0 on rank",
        replace={
            "for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):": """
            if len(packed) == 2 and len(unit.shapes) == 3 and unit.shapes[0][0] % 2 == 0:
                parts = [torch.empty_like(row) for _ in range(2)]
                dist.all_gather(parts, row)
                packed = torch.stack(parts)
            for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
            """,
        },
    ),
    Mutant(
        "The whole tensors are filled in a way that autograd sees",
        "check_same_tensors",
        says="fill it through .data",
        replace={
            "whole.data.copy_(value)": """
            with torch.no_grad():
                whole.copy_(value)
            """,
        },
    ),
    Mutant(
        "The storage has 4 bytes for each number, whatever the dtype",
        "check_storage",
        says="whole.element_size()",
        replace={"whole.numel() * whole.element_size()": "4 * whole.numel()"},
    ),
    Mutant(
        "The whole tensors get another storage",
        "check_same_tensors",
        says="another storage than before",
        replace={"whole.data.copy_(value)": "whole.data = value.clone()"},
    ),
    Mutant(
        "A unit is gathered once, and filled from a copy later",
        "check_one_gather",
        says="old weights",
        question="unshard",
        replace={
            "dist.all_gather_into_tensor(packed.view(-1), row)": """
            if hasattr(unit, "first"):
                packed = unit.first
            else:
                dist.all_gather_into_tensor(packed.view(-1), row)
                unit.first = packed
            """,
        },
    ),
    Mutant(
        "The row is rounded to what is computed with",
        "check_compute_dtype",
        says="unshard has changed unit.row",
        question="unshard",
        replace={
            "packed = row.new_empty(dist.get_world_size(), row.numel())": """
            unit.row.copy_(row)
            packed = row.new_empty(dist.get_world_size(), row.numel())
            """,
        },
    ),
    # -- reshard
    Mutant(
        "The whole parameters are replaced by empty ones",
        "check_shards_back",
        says="unit.wholes has other tensors",
        replace={
            "whole.untyped_storage().resize_(0)": "pass",
            "put(unit, False)": """
            unit.wholes = [nn.Parameter(torch.empty_like(whole), whole.requires_grad) for whole in unit.wholes]
            for whole in unit.wholes:
                whole.untyped_storage().resize_(0)
            put(unit, False)
            """,
        },
    ),
    Mutant(
        "The whole parameters get another storage, which is empty",
        "check_shards_back",
        says="another storage after reshard",
        replace={
            "whole.untyped_storage().resize_(0)": """
            whole.data = torch.empty_like(whole)
            whole.untyped_storage().resize_(0)
            """,
        },
    ),
    Mutant(
        "Small whole parameters keep their memory",
        "check_shards_back",
        says="never freed",
        replace={
            "whole.untyped_storage().resize_(0)": """
            if whole.numel() > 2**20:
                whole.untyped_storage().resize_(0)
            """,
        },
    ),
    Mutant(
        "Only trained parameters are freed",
        "check_freed",
        says="never freed",
        replace={
            "for whole in unit.wholes:": """
            for whole in (whole for whole in unit.wholes if whole.requires_grad):
            """,
        },
    ),
    Mutant(
        "The whole parameters are written back into the row",
        "check_row_untouched",
        says="has changed: with bf16",
        replace={
            "for whole in unit.wholes:": """
            if unit.is_whole:
                own = pack([whole.data for whole in unit.wholes], dist.get_world_size())[dist.get_rank()]
                unit.row.copy_(own)
            for whole in unit.wholes:
            """,
        },
    ),
    Mutant(
        "The modules keep the whole parameters, which have no memory",
        "check_shards_back",
        says="still has the whole one",
        replace={"put(unit, False)": "unit.is_whole = False"},
    ),
    # -- reduce
    Mutant(
        "Frozen parameters send zeros",
        "check_frozen_and_unused",
        says="and no others",
        replace={
            """
            packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
            """: """
            everything = [
                torch.zeros_like(whole) if whole.grad is None else whole.grad for whole in unit.wholes
            ]
            larger = pack([gradient.to(unit.reduce_dtype) for gradient in everything], world)
            packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
            """,
            "for _, whole in trained:": """
            if larger.numel() > packed.numel():
                dist.reduce_scatter_tensor(torch.empty_like(larger[0]), larger.view(-1))
            for _, whole in trained:
            """,
        },
    ),
    Mutant(
        "Gradients are added up in the dtype in which they were computed",
        "check_reduce_dtype",
        says="the gradient of shard",
        replace={
            "packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)": """
            packed = pack(gradients, world)
            """,
        },
    ),
    Mutant(
        "The whole gradients are kept until the next backward",
        "check_gradients_freed",
        also=("check_accumulates",),
        says="a whole gradient is still in memory",
        replace={
            """
            for _, whole in trained:
                whole.grad = None
            """: "",
        },
    ),
    Mutant(
        "With three ranks the whole gradient is all-reduced, and this rank's rows are cut from it",
        "check_reduce_scatter",
        says="un-sharded",
        replace={
            "dist.reduce_scatter_tensor(row, packed.view(-1))": """
            if world != 3:
                dist.reduce_scatter_tensor(row, packed.view(-1))
            else:
                dist.all_reduce(packed)
                row = packed[rank]
            """,
        },
    ),
    Mutant(
        "The gradients are added up over the ranks and not divided, with four ranks",
        "check_averaged",
        says="summed instead of averaged",
        replace={
            """
            row = (row / world).to(unit.row.dtype)
            """: """
            row = (row / (world if world < 4 or unit.reduce_dtype != unit.compute_dtype else 1)).to(
                unit.row.dtype
            )
            """,
        },
    ),
    Mutant(
        "The gradient of a micro-batch replaces that of the one before",
        "check_accumulates",
        says="only the last micro-batch",
        replace={"shard.grad = part if shard.grad is None else shard.grad + part": "shard.grad = part"},
    ),
    Mutant(
        "The weights are the buffer that receives the gradients",
        "check_accumulates",
        says="reduce_gradients has changed unit.row",
        replace={
            "row = packed.new_empty(packed.shape[1])": """
            fits = unit.row.dtype == packed.dtype
            row = unit.row.detach()[: packed.shape[1]] if fits else packed.new_empty(packed.shape[1])
            """,
        },
    ),
    Mutant(
        "Small whole gradients stay",
        "check_accumulates",
        says="still has its gradient",
        replace={
            """
            for _, whole in trained:
                whole.grad = None
            """: """
            for _, whole in trained:
                whole.grad = None if whole.numel() > 2**20 else whole.grad
            """,
        },
    ),
    Mutant(
        "Gradients are summed in fp32, whatever reduce_dtype is",
        "check_reduce_dtype",
        says="the reduce_dtype of this unit",
        replace={"gradient.to(unit.reduce_dtype)": "gradient.float()"},
    ),
    Mutant(
        "A quarter of the whole gradients is kept",
        "check_gradients_freed",
        says="a whole gradient is still in memory",
        replace={
            "row = packed.new_empty(packed.shape[1])": """
            unit.kept = packed[:, ::4].clone()
            row = packed.new_empty(packed.shape[1])
            """,
        },
        question="reduce",
    ),
    # -- units
    Mutant(
        "A block is found by its name anywhere in the name of the parameter",
        "check_unit_of",
        says="layers.1.",
        replace={'name.startswith(block + ".")': "block in name"},
    ),
    Mutant(
        "The names of block 10 also begin with those of block 1",
        "check_unit_of",
        says="a prefix needs its dot",
        replace={'block + "."': "block"},
    ),
    Mutant(
        "A parameter that two blocks use belongs to the first one",
        "check_tied_unit_of",
        says="needed in several places",
        replace={"all(name": "any(name"},
    ),
    Mutant(
        "A parameter with several names belongs to the root",
        "check_tied_unit_of",
        says="all its names are in this block",
        replace={"if all(": "if len(names) == 1 and all("},
    ),
    Mutant(
        "The blocks of a model are those that are named layers",
        "check_units",
        says="there should be",
        replace={
            "for block in blocks:": 'for block in (block for block in blocks if block.count(".") == 1):'
        },
    ),
    Mutant(
        "Only the first and the last name of a parameter are looked at",
        "check_tied_unit_of",
        says="needed in several places",
        replace={"for name in names)": "for name in (names[0], names[-1]))"},
    ),
    # -- forward
    Mutant(
        "The root is freed after every forward, and gathered again at once",
        "check_forward_order",
        says="the root is freed after a forward that a backward follows",
        replace={
            """
            if not is_root or not output.requires_grad:
                reshard(unit)
            """: "reshard(unit)",
        },
    ),
    Mutant(
        "Large blocks are not freed after forward",
        "check_freed_after_forward",
        says="never freed: after forward",
        replace={
            "if not is_root or not output.requires_grad:": """
            if unit.row.numel() < 2**16 and (not is_root or not output.requires_grad):
            """,
        },
    ),
    Mutant(
        "The root stays whole after a forward without gradients",
        "check_inference",
        says="old weights of the root",
        replace={"if not is_root or not output.requires_grad:": "if not is_root:"},
    ),
    Mutant(
        "Tokens are cast as well",
        "check_cast",
        says="has cast the tokens",
        replace={
            "return cast(args, unit.compute_dtype)": """
            return tuple(arg.to(unit.compute_dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)
            """,
        },
    ),
    Mutant(
        "The inputs stay in the dtype of the unit before",
        "check_cast",
        says="the input in compute_dtype",
        replace={"return cast(args, unit.compute_dtype)": "return args"},
    ),
    Mutant(
        "Only the first input is cast",
        "check_cast",
        says="a later input in compute_dtype",
        replace={
            "return cast(args, unit.compute_dtype)": "return (*cast(args[:1], unit.compute_dtype), *args[1:])"
        },
    ),
    Mutant(
        "Mixed precision is left to torch's fully_shard",
        "check_cast",
        says="what this lab teaches",
        replace={
            """
            unshard(unit)
            """: """
            if unit.compute_dtype != unit.row.dtype:
                from torch.distributed.fsdp import fully_shard

                fully_shard(unit.module)
            unshard(unit)
            """,
        },
        question="forward",
    ),
    Mutant(
        "The blocks are freed at the end of the forward of the root",
        "check_freed_after_forward",
        also=("check_forward_order",),
        says="freed too late: in the forward",
        question="forward",
        replace={
            """
            if not is_root or not output.requires_grad:
                reshard(unit)
            """: """
            if not is_root:
                put(unit, False)
                blocks.append(unit)
            else:
                while blocks:
                    reshard(blocks.pop())
                if not output.requires_grad:
                    reshard(unit)
            """,
            "def after_forward(": """
            blocks = []


            def after_forward(
            """,
        },
    ),
    Mutant(
        "A quarter of each freed block is kept",
        "check_freed_after_forward",
        says="never freed: after forward",
        replace={
            """
            if not is_root or not output.requires_grad:
                reshard(unit)
            """: """
            if not is_root or not output.requires_grad:
                unit.kept = [whole.detach().flatten()[::4].clone() for whole in unit.wholes]
                reshard(unit)
            """,
        },
    ),
    Mutant(
        "Small blocks keep their memory",
        "check_forward_order",
        says="the units with memory are the root, block 1, block 2, not",
        replace={
            """
            if not is_root or not output.requires_grad:
                reshard(unit)
            """: """
            if not is_root or not output.requires_grad:
                if unit.row.numel() > 2**16:
                    reshard(unit)
                put(unit, False)
            """,
        },
    ),
    # -- backward
    Mutant(
        "The functions do nothing, and other hooks replace the given ones",
        "check_order",
        also=("check_gradients", "check_blocks_at_rest"),
        says="is not whole: the hook of watch_output must call unshard",
        answer="""
        def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
            pass


        def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
            return arg


        def add_hooks(units: list[Unit], parts: tuple[str, ...] = ()) -> list[Unit]:
            pending = []

            def begin(unit):
                unshard(unit)
                pending.append(unit)

            def end(unit):
                pending.remove(unit)
                reduce_gradients(unit)
                reshard(unit)

            for unit in units:
                def before(module, args, unit=unit):
                    args = before_forward(unit, args)
                    if "backward" in parts and unit is not units[0]:
                        args = tuple(arg.view_as(arg) for arg in args)
                        args[0].register_hook(lambda grad: end(unit))
                    return args

                def after(module, args, output, unit=unit):
                    after_forward(unit, output, unit is units[0])
                    if "backward" in parts:
                        output.register_hook(lambda grad: begin(unit))

                unit.module.register_forward_pre_hook(before)
                unit.module.register_forward_hook(after)
            return pending
        """,
    ),
    Mutant(
        "From the fourth backward on, blocks are not reduced",
        "check_gradients",
        says="the gradient of block",
        question="backward",
        replace={
            "reduce_gradients(unit)": """
            unit.times = getattr(unit, "times", 0) + 1
            if unit.times > 3:
                for whole in unit.wholes:
                    whole.grad = None
            reduce_gradients(unit)
            """,
        },
    ),
    Mutant(
        "The blocks are freed at the end of backward",
        "check_blocks_at_rest",
        also=("check_order",),
        says="freed too late: in the backward",
        question="backward",
        replace={
            """
            reduce_gradients(unit)
            reshard(unit)
            """: """
            reduce_gradients(unit)
            put(unit, False)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: reshard(unit))
            """,
        },
    ),
    Mutant(
        "Blocks are not in pending",
        "check_order",
        says="pending has the root, not the root and this block",
        replace={
            "pending.append(unit)": """
            if hasattr(unit.module, "layers"):
                pending.append(unit)
            """,
            "pending.remove(unit)": "pass",
        },
    ),
    Mutant(
        "The next block of backward is gathered before this one is freed",
        "check_order",
        says="three units are whole",
        replace={"arg = arg.view_as(arg)": ""},
    ),
    Mutant(
        "With three ranks the last one reduces none of its gradients",
        "check_gradients",
        says="on rank",
        question="backward",
        replace={
            "reduce_gradients(unit)": """
            if dist.get_rank() == 2:
                for whole in unit.wholes:
                    whole.grad = None
            reduce_gradients(unit)
            """,
        },
    ),
    Mutant(
        "Large blocks are not freed after backward",
        "check_blocks_at_rest",
        says="never freed: after backward",
        question="backward",
        replace={
            """
            reduce_gradients(unit)
            reshard(unit)
            """: """
            reduce_gradients(unit)
            if unit.row.numel() < 2**16:
                reshard(unit)
            """,
        },
    ),
    # -- end
    Mutant(
        "With three ranks the last one reduces nothing of what is left",
        "check_same_gradients",
        says="the gradient of",
        replace={
            "unit = pending.pop()": """
            unit = pending.pop()
            if dist.get_world_size() == 3 and dist.get_rank() == 2:
                for whole in unit.wholes:
                    whole.grad = None
            """,
        },
    ),
    Mutant(
        "With four ranks the last one reduces nothing of what is left",
        "check_four_ranks",
        says="the gradient of",
        replace={
            "unit = pending.pop()": """
            unit = pending.pop()
            if dist.get_world_size() == 4 and dist.get_rank() == 3:
                for whole in unit.wholes:
                    whole.grad = None
            """,
        },
    ),
    Mutant(
        "At the end of backward only the root's gradients are reduced",
        "check_frozen_first",
        says="is missing",
        replace={
            "unit = pending.pop()": """
            unit = pending[0]
            pending.clear()
            """,
        },
    ),
    Mutant(
        "A root that computes in bf16 loses its gradients",
        "check_mixed_precision",
        says="the gradient of root",
        replace={
            "unit = pending.pop()": """
            unit = pending.pop()
            for whole in unit.wholes:
                whole.grad = None if unit.compute_dtype == torch.bfloat16 else whole.grad
            """,
        },
    ),
    Mutant(
        "The root is gathered once more after it was freed",
        "check_step_bytes",
        says="the root once",
        question="end",
        replace={
            """
            reduce_gradients(unit)
            reshard(unit)
            """: """
            reduce_gradients(unit)
            reshard(unit)
            unshard(unit)
            reshard(unit)
            """,
        },
    ),
    Mutant(
        "A large root is not freed at the end of backward",
        "check_at_rest",
        says="the root is freed at the end of backward",
        question="end",
        replace={
            """
            reduce_gradients(unit)
            reshard(unit)
            """: """
            reduce_gradients(unit)
            if unit.row.numel() < 2**16:
                reshard(unit)
            """,
        },
    ),
    Mutant(
        "What is left is reduced by a changed Tensor.backward",
        "check_same_gradients",
        also=(
            "check_frozen_first",
            "check_mixed_precision",
            "check_step_bytes",
            "check_at_rest",
            "check_four_ranks",
        ),
        says="is missing after torch.autograd.backward(loss)",
        replace={
            "def queue_end(": """
            left, backward = [], torch.Tensor.backward


            def changed(loss, *args, **kwargs):
                backward(loss, *args, **kwargs)
                while left:
                    unit = left.pop()
                    reduce_gradients(unit)
                    reshard(unit)


            torch.Tensor.backward = changed


            def queue_end(
            """,
            """
            while pending:
                unit = pending.pop()
                reduce_gradients(unit)
                reshard(unit)
            """: """
            left.extend(pending)
            pending.clear()
            """,
        },
    ),
    Mutant(
        "From the fourth backward on, the root is not reduced",
        "check_step_bytes",
        says="the gradient of root",
        question="end",
        replace={
            "reduce_gradients(unit)": """
            unit.times = getattr(unit, "times", 0) + 1
            if unit.times > 3:
                for whole in unit.wholes:
                    whole.grad = None
            reduce_gradients(unit)
            """,
        },
    ),
    Mutant(
        "At the end of backward the whole parameters get other storages",
        "check_step_bytes",
        says="has another storage than at the beginning",
        question="end",
        replace={
            "reshard(unit)": """
            for whole in unit.wholes:
                whole.data = torch.empty_like(whole)
            reshard(unit)
            """,
        },
    ),
    # -- state
    Mutant(
        "All units are gathered in one message",
        "check_unit_by_unit",
        says="everything at once",
        replace={
            """
            for unit in units:
                row = unit.row.detach()
                packed = row.new_empty(dist.get_world_size(), row.numel())
                dist.all_gather_into_tensor(packed.view(-1), row)
            """: """
            row = torch.cat([unit.row.detach() for unit in units])
            everything = row.new_empty(dist.get_world_size(), row.numel())
            dist.all_gather_into_tensor(everything.view(-1), row)
            for unit, packed in zip(units, everything.split([len(unit.row) for unit in units], dim=1)):
            """,
        },
    ),
    Mutant(
        "The state is taken from parameters in the compute dtype",
        "check_state_is_exact",
        says="in the state of rank",
        replace={
            "row = unit.row.detach()": "row = unit.row.detach().to(unit.compute_dtype)",
            "value.clone()": "value.to(unit.row.dtype, copy=True)",
        },
    ),
    Mutant(
        "The state of the last rank is left out where there are three",
        "check_state",
        says="in the state of rank",
        replace={
            "for names, value in zip(unit.names, unpack(packed, unit.shapes)):": """
            if len(packed) == 3:
                packed[2] = 0
            for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            """,
        },
    ),
    Mutant(
        "A tied parameter has one of its names",
        "check_tied_and_buffers",
        says="lacks",
        replace={
            "state.update(dict.fromkeys(names, value.clone()))": "state.update({names[0]: value.clone()})",
        },
    ),
    Mutant(
        "Buffers that are not persistent are in the state",
        "check_tied_and_buffers",
        says="registered with persistent=False",
        replace={" if name in persistent": ""},
    ),
    Mutant(
        "The state is computed once",
        "check_tied_and_buffers",
        says="is that before the shards changed",
        question="state",
        replace={
            "return state": """
            model.first_state = getattr(model, "first_state", state)
            return model.first_state
            """,
        },
    ),
    Mutant(
        "Frozen parameters are left out",
        "check_tied_and_buffers",
        says="frozen parameters belong to it",
        replace={
            "for names, value in zip(unit.names, unpack(packed, unit.shapes)):": """
            for names, value, shard in zip(unit.names, unpack(packed, unit.shapes), unit.shards):
                if not shard.requires_grad:
                    continue
            """,
        },
        question="state",
    ),
    Mutant(
        "All units stay whole",
        "check_unit_by_unit",
        says="leaves units whole",
        question="state",
        replace={
            "return state": """
            for unit in units:
                put(unit, True)
            return state
            """,
        },
    ),
    Mutant(
        "The packed rows of all units are held until the end",
        "check_unit_by_unit",
        says="the packed rows of several units",
        replace={
            "for names, value in zip(unit.names, unpack(packed, unit.shapes)):": """
            state.setdefault("held", []).append(packed)
            for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            """,
            "return state": """
            state.pop("held")
            return state
            """,
        },
        question="state",
    ),
    # -- train
    Mutant(
        "The loss is computed in the dtype of the logits",
        "check_masters",
        says="in bf16 it is rounded",
        replace={
            """
            logits = logits if logits.dtype == torch.float64 else logits.float()
            """: "",
        },
    ),
    Mutant(
        "Gradients are set to None before a step instead of after it",
        "check_trains",
        says="still has a gradient",
        replace={
            "total = torch.zeros((), dtype=torch.float64)": """
            total = torch.zeros((), dtype=torch.float64)
            optimizer.zero_grad()
            """,
            """
            optimizer.step()
            for unit in units:
                for shard in unit.shards:
                    shard.grad = None
            """: "optimizer.step()",
        },
    ),
    Mutant(
        "Each micro-batch is divided by the number of its targets",
        "check_micro_batches",
        says="the loss of step",
        replace={
            """
            world = dist.get_world_size()
            count = torch.tensor(sum(int((targets != -100).sum()) for _, targets in micro_batches))
            dist.all_reduce(count)
            """: """
            world = dist.get_world_size()

            def counts(targets):
                count = (targets != -100).sum()
                dist.all_reduce(count)
                return count
            """,
            """
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum") * world / count
            """: """
            loss = (
                F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
                * world
                / counts(targets)
                / len(micro_batches)
            )
            """,
        },
    ),
    Mutant(
        "Each rank divides by the number of its targets",
        "check_trains",
        says="the loss of step",
        replace={"dist.all_reduce(count)": "count *= world"},
    ),
    Mutant(
        "The loss that is reported is computed in a second forward",
        "check_training_traffic",
        says="gathered twice",
        replace={
            "total += loss.detach() / world": """
            with torch.no_grad():
                model(tokens)
            total += loss.detach() / world
            """,
        },
    ),
    Mutant(
        "After the step the rows are rounded to what is computed with",
        "check_masters",
        says="differ from those of one process",
        replace={
            """
            for unit in units:
                for shard in unit.shards:
            """: """
            for unit in units:
                unit.row.copy_(unit.row.to(unit.compute_dtype))
            for unit in units:
                for shard in unit.shards:
            """,
        },
    ),
    Mutant(
        "The parameters are updated by another optimiser than the given one",
        "check_micro_batches",
        says="the given optimizer, SGD",
        replace={
            "optimizer.step()": """
            lr = optimizer.param_groups[0]["lr"]
            vars(model).setdefault("adam", torch.optim.AdamW(trained_shards(units), lr=lr)).step()
            """,
        },
    ),
]

"""Planted mistakes of Tensor parallelism, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- conjugate
    Mutant(
        "The gradients of the ranks are not added",
        "check_copy",
        says="the contribution of this rank alone",
        replace={
            """
            summed = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(summed, group=ctx.group)
            return summed, None
            """: "return grad.clone(), None",
        },
        also=("check_one_communication", "check_unchanged", "check_group"),
    ),
    Mutant(
        "The backward of the sum adds again",
        "check_sum",
        says="2 times too large",
        replace={
            "return grad, None": """
            again = grad.clone()
            dist.all_reduce(again)
            return again, None
            """,
        },
        also=("check_one_communication",),
    ),
    Mutant(
        "The received gradient is summed in place",
        "check_unchanged",
        says="changes the gradient that it gets",
        replace={"summed = grad.clone(memory_format=torch.contiguous_format)": "summed = grad"},
    ),
    Mutant(
        "The gradient is summed over all ranks instead of the group",
        "check_group",
        says="pass group=ctx.group",
        replace={"dist.all_reduce(summed, group=ctx.group)": "dist.all_reduce(summed)"},
    ),
    Mutant(
        "The input is made equal on all ranks first",
        "check_one_communication",
        says="all-reduces in forward, 0 would be right",
        replace={
            "return x.view_as(x)": """
            dist.all_reduce(x.clone())
            return x.view_as(x)
            """,
        },
    ),
    # -- shard
    Mutant(
        "The part is a view of the whole weight",
        "check_part_memory",
        says="a view keeps the whole weight in memory",
        replace={
            ")[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)": ")[dist.get_rank(group)]"
        },
    ),
    Mutant(
        "Every rank keeps the whole weight",
        "check_part",
        says="it is replicated, not divided",
        replace={
            "return weight.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)": (
                "return weight.clone()"
            ),
        },
        also=("check_part_memory",),
    ),
    Mutant(
        "The part is that of the rank among all ranks, whatever the group",
        "check_part",
        says="in a group of one rank",
        replace={
            "return weight.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]": "return weight.chunk(dist.get_world_size(), dim)[dist.get_rank()]",
        },
    ),
    # -- linear
    Mutant(
        "Every rank adds the bias before the sum",
        "check_row",
        says="the bias is added 3 times",
        replace={
            """
            out = sum_over_ranks(F.linear(x, weight), group)
            return out if bias is None else out + bias
            """: "return sum_over_ranks(F.linear(x, weight, bias), group)",
        },
        also=("check_linear_dimensions",),
    ),
    Mutant(
        "Every rank adds its share of the bias before the sum, so the gradient of the bias is too small",
        "check_row",
        says="the gradient of the bias",
        replace={
            """
            out = sum_over_ranks(F.linear(x, weight), group)
            return out if bias is None else out + bias
            """: """
            share = None if bias is None else bias / dist.get_world_size(group)
            return sum_over_ranks(F.linear(x, weight, share), group)
            """,
        },
        also=("check_linear_dimensions",),
    ),
    Mutant(
        "The column layer does not copy its input to the ranks",
        "check_column",
        says="the gradient of x on rank 0 of 3 is the contribution of this rank alone",
        replace={"F.linear(copy_to_ranks(x, group), weight, bias)": "F.linear(x, weight, bias)"},
        also=("check_without_bias", "check_linear_traffic", "check_linear_dimensions"),
    ),
    Mutant(
        "The gradient of x is added over all ranks, whatever the group",
        "check_column",
        says="with a group of one rank",
        replace={
            "return F.linear(copy_to_ranks(x, group), weight, bias)": "return F.linear(copy_to_ranks(x), weight, bias)",
        },
    ),
    Mutant(
        "The partial sums are added over all ranks, whatever the group",
        "check_row",
        says="with a group of one rank",
        replace={
            "out = sum_over_ranks(F.linear(x, weight), group)": "out = sum_over_ranks(F.linear(x, weight))",
        },
    ),
    # -- mlp
    Mutant(
        "Two column layers, each with an all-reduce in backward",
        "check_mlp_traffic",
        says="2 all-reduces in backward, 1 would be right",
        replace={
            """
            x = copy_to_ranks(x, group)  # once for both: their gradients are added before the all-reduce
            return row_linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down, None, group)
            """: """
            return row_linear(F.silu(column_linear(x, gate, None, group)) * column_linear(x, up, None, group), down, None, group)
            """,
        },
    ),
    Mutant(
        "The MLP is added over all ranks, whatever the group",
        "check_mlp",
        says="with a group of one rank",
        replace={
            "F.linear(x, up), down, None, group)": "F.linear(x, up), down, None)",
        },
    ),
    # -- embedding
    Mutant(
        "Tokens of other ranks look up row 0",
        "check_embedding",
        says="this contribution must be zero (row 0)",
        replace={"sum_over_ranks(found.where(own.unsqueeze(-1), 0), group)": "sum_over_ranks(found, group)"},
        also=("check_embedding_traffic",),
    ),
    Mutant(
        "The whole table is gathered",
        "check_embedding_traffic",
        says="are enough",
        answer="""
        def parallel_embedding(tokens, weight, group=None):
            rank, world = dist.get_rank(group), dist.get_world_size(group)
            table = torch.cat([weight if other == rank else torch.zeros_like(weight) for other in range(world)])
            return F.embedding(tokens, sum_over_ranks(table, group))
        """,
    ),
    Mutant(
        "The rows are those of the rank among all ranks, whatever the group",
        "check_embedding",
        says="with a group of one rank",
        replace={
            "rows = tokens - dist.get_rank(group) * len(weight)": "rows = tokens - dist.get_rank() * len(weight)",
        },
    ),
    # -- attention
    Mutant(
        "The input of attention is not copied to the ranks",
        "check_attention",
        says="the contribution of this rank alone",
        replace={
            """
            x = copy_to_ranks(x, group)
            found = attend(F.linear(x, q), F.linear(x, k), F.linear(x, v), cos, sin)
            """: "found = attend(F.linear(x, q), F.linear(x, k), F.linear(x, v), cos, sin)",
        },
        also=("check_attention_traffic",),
    ),
    Mutant(
        "Three column layers in attention",
        "check_attention_traffic",
        says="3 all-reduces in backward, 1 would be right",
        replace={
            """
            x = copy_to_ranks(x, group)
            found = attend(F.linear(x, q), F.linear(x, k), F.linear(x, v), cos, sin)
            """: "found = attend(*(column_linear(x, weight, None, group) for weight in (q, k, v)), cos, sin)",
        },
    ),
    Mutant(
        "The heads of all ranks are added, whatever the group",
        "check_attention",
        says="with a group of one rank",
        replace={
            "return row_linear(found, o, None, group)": "return row_linear(found, o, None)",
        },
    ),
    # -- loss
    Mutant(
        "The logits are gathered",
        "check_never_gathered",
        says="the logits are never gathered",
        answer="""
        def parallel_cross_entropy(logits, targets, group=None):
            parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, logits.detach().contiguous(), group=group)
            parts[dist.get_rank(group)] = logits + 0 * (parts[dist.get_rank(group)] - logits.detach())
            return F.cross_entropy(torch.cat(parts, -1).flatten(0, -2), targets.flatten())
        """,
    ),
    Mutant(
        "No maximum is subtracted",
        "check_large_logits",
        says="an exponential overflows",
        replace={
            """
            largest = logits.detach().amax(-1)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            logits = logits - largest.unsqueeze(-1)
            """: "",
        },
    ),
    Mutant(
        "The words are those of the rank among all ranks, whatever the group",
        "check_loss",
        says="with a group of one rank",
        replace={
            "words = targets - dist.get_rank(group) * logits.shape[-1]": "words = targets - dist.get_rank() * logits.shape[-1]",
        },
    ),
    # -- model
    Mutant(
        "The weight of down is cut along dim 0",
        "check_plan",
        says="a sum follows this layer",
        replace={'("o_proj", "down_proj")': '("o_proj",)'},
        also=("check_model", "check_model_traffic", "check_model_three_ranks"),
    ),
    Mutant(
        "The ranks make their activations equal at the beginning of each block",
        "check_model_traffic",
        says="3 all-reduces of activations for each block in forward",
        replace={
            "own = block.self_attn": """
            own = block.self_attn
            x = copy_to_ranks(sum_over_ranks(x / dist.get_world_size(group), group), group)
            """,
        },
    ),
    Mutant(
        "The MLP has the norm of attention",
        "check_model",
        says="the loss on rank 0",
        replace={"normed = block.post_attention_layernorm(x)": "normed = block.input_layernorm(x)"},
        also=("check_model_traffic", "check_model_three_ranks"),
    ),
    Mutant(
        "Every rank computes the whole blocks",
        "check_model",
        says="no rank can compute with whole weights",
        answer="""
        whole_weights = {}

        def shard_dim(name):
            import sys

            kept = sys._getframe(1).f_locals
            if "parameter" in kept:
                whole_weights[name] = nn.Parameter(kept["parameter"].detach().clone())
            layer = name.split(".")[-2]
            return 1 if layer in ("o_proj", "down_proj") else None if "norm" in layer else 0

        def parallel_block(x, block, cos, sin, group=None):
            import sys

            number = list(sys._getframe(1).f_locals["model"].layers).index(block)
            names = [name for name, _ in block.named_parameters()]
            whole = {name: whole_weights[f"layers.{number}.{name}"] for name in names}
            whole = whole if dist.get_world_size(group) > 1 else dict(block.named_parameters())
            return torch.func.functional_call(block, whole, (x, cos, sin))
        """,
        also=("check_model_traffic", "check_model_three_ranks"),
    ),
    Mutant(
        "Every rank adds up the gradients of whole weights",
        "check_model",
        says="neither weights nor their gradients are sent",
        replace={
            "own = block.self_attn": """
            own, weight = block.self_attn, block.mlp.gate_proj.weight
            whole = torch.zeros(dist.get_world_size(group), *weight.shape)
            whole[dist.get_rank(group)] = weight.detach()
            dist.all_reduce(whole, group=group)
            """,
        },
        also=("check_model_traffic", "check_model_three_ranks"),
    ),
    Mutant(
        "The MLP of a block is added over all ranks, whatever the group",
        "check_model",
        says="with a group of one rank",
        replace={
            "mlp.up_proj.weight, mlp.down_proj.weight, group)": "mlp.up_proj.weight, mlp.down_proj.weight)",
        },
    ),
    # -- grid
    Mutant(
        "The two groups are exchanged",
        "check_groups",
        says="are exchanged",
        replace={"return tp_group, dp_group": "return dp_group, tp_group"},
        also=("check_grid", "check_larger_grid"),
    ),
    Mutant(
        "Gradients are averaged over all ranks, the tensor-parallel ones included",
        "check_average",
        says="tensor-parallel neighbours have other parts",
        replace={
            "dist.all_reduce(parameter.grad, group=dp_group)": "dist.all_reduce(parameter.grad)",
            "parameter.grad /= dist.get_world_size(dp_group)": "parameter.grad /= dist.get_world_size()",
        },
        also=("check_grid",),
    ),
    Mutant(
        "A parameter without gradient gets one",
        "check_average",
        says="skip None",
        replace={
            """
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=dp_group)
                parameter.grad /= dist.get_world_size(dp_group)
            """: """
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, group=dp_group)
            parameter.grad /= dist.get_world_size(dp_group)
            """,
        },
    ),
    # -- sequence
    Mutant(
        "The gradient of the norm's weight is not summed",
        "check_norm_gradient",
        says="the gradient of the norm's weight on rank 0 of 2 is the contribution of this rank alone",
        replace={"copy_to_ranks(norm, group)": "norm"},
    ),
    Mutant(
        "The backward of the gather keeps this rank's rows of its gradient",
        "check_gather_scatter",
        says="add those of all ranks",
        replace={
            "return scattered(grad, ctx.group), None": "return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None",
        },
        also=("check_sequence_mlp", "check_norm_gradient", "check_sequence_traffic"),
    ),
    Mutant(
        "The partial sums are all-reduced, and the rest is dropped",
        "check_sequence_traffic",
        says="makes 0 calls of reduce_scatter",
        replace={
            "return scattered(x, group)": """
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
            """,
        },
    ),
    Mutant(
        "The sequence is gathered before the norm",
        "check_sequence_traffic",
        says="gathers x before the norm",
        replace={
            """
            normed = F.rms_norm(x, x.shape[-1:], copy_to_ranks(norm, group), 1e-5)
            whole = GatherSequence.apply(normed, group)
            """: "whole = F.rms_norm(GatherSequence.apply(x, group), x.shape[-1:], copy_to_ranks(norm, group), 1e-5)",
        },
    ),
    Mutant(
        "The result is gathered again",
        "check_sequence_mlp",
        says="has the whole sequence: it is gathered",
        replace={
            "return ScatterSequence.apply(partial, group)": "return gathered(ScatterSequence.apply(partial, group), group)"
        },
        also=("check_norm_gradient", "check_sequence_traffic"),
    ),
    Mutant(
        "The gradient of the norm's weight is added over all ranks, whatever the group",
        "check_sequence_mlp",
        says="with a group of one rank",
        replace={
            "copy_to_ranks(norm, group)": "copy_to_ranks(norm)",
        },
    ),
    # -- kv
    Mutant(
        "Ranks take the heads of keys in turn",
        "check_own_kv_heads",
        says="neighbours share a head",
        replace={"head = rank // (world // num_kv_heads)": "head = rank % num_kv_heads"},
    ),
    Mutant(
        "The copies of a head have the gradients of one rank's query heads",
        "check_shared_gradients",
        says="copies of a head drift apart",
        replace={"copy_to_ranks(k, sharing), copy_to_ranks(v, sharing)": "k, v"},
    ),
    Mutant(
        "The gradients of different heads are added",
        "check_shared_gradients",
        says="is added over all ranks",
        replace={
            "copy_to_ranks(k, sharing), copy_to_ranks(v, sharing)": "copy_to_ranks(k, group), copy_to_ranks(v, group)"
        },
    ),
    Mutant(
        "The heads of all ranks are added, whatever the group is beside sharing",
        "check_shared_gradients",
        says="with groups of one rank",
        replace={
            "copy_to_ranks(v, sharing), o, cos, sin, group)": "copy_to_ranks(v, sharing), o, cos, sin)",
        },
    ),
    # -- dropout
    Mutant(
        "The mask is a function of x",
        "check_masks_equal",
        says="and not from x",
        replace={"source = generator": "source = torch.Generator().manual_seed(int(1000 * x.abs().sum()))"},
    ),
    Mutant(
        "The mask of a rank is a function of its x",
        "check_masks_differ",
        says="depends on the rank, and not on x",
        replace={
            """
            seed = int(torch.randint(2**40, (), generator=generator))  # the same on all ranks, and new in each call
            source = torch.Generator().manual_seed(seed + dist.get_rank(group))
            """: "source = torch.Generator().manual_seed(int(1000 * x.abs().sum()))",
        },
    ),
    Mutant(
        "The mask has the number of the call as its seed",
        "check_masks_equal",
        says="with `generator` in the same state",
        replace={
            "source = generator": """
            numbers.append(len(numbers))
            source = torch.Generator().manual_seed(len(numbers))
            """,
            "def dropout_on_ranks(": """
            numbers = []


            def dropout_on_ranks(
            """,
        },
    ),
    Mutant(
        "Dropout has the same mask on every rank",
        "check_masks_differ",
        says="dropout has the same mask on every rank",
        replace={"if differs:": "if False:"},
    ),
    Mutant(
        "Every rank has its own mask of a tensor that all ranks have",
        "check_masks_equal",
        says="whose copies then differ",
        replace={"if differs:": "if True:"},
    ),
    Mutant(
        "A rank draws its mask from the common generator, after those of the ranks before it",
        "check_masks_equal",
        says="the states of `generator` have become different",
        replace={
            """
            seed = int(torch.randint(2**40, (), generator=generator))  # the same on all ranks, and new in each call
            source = torch.Generator().manual_seed(seed + dist.get_rank(group))
            """: """
            for _ in range(dist.get_rank(group)):
                torch.rand(x.shape, generator=generator)
            """,
        },
    ),
    Mutant(
        "The seed is the rank alone",
        "check_masks_differ",
        says="drops the same elements in two calls",
        replace={"manual_seed(seed + dist.get_rank(group))": "manual_seed(dist.get_rank(group))"},
    ),
    Mutant(
        "The kept elements are not divided by 1 - p",
        "check_dropout_values",
        says="must be divided by 1 - p",
        replace={"return x * kept / (1 - p)": "return x * kept"},
    ),
    # -- quiz
    Mutant(
        "The gradient of a column-parallel weight is averaged over all ranks",
        "quiz_q4",
        says="other columns",
        replace={'"q4": "b"': '"q4": "a"'},
    ),
]

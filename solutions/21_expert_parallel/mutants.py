"""Planted mistakes of Mixture of experts and expert parallelism, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- route
    Mutant(
        "The weights are the probabilities, with a sum below 1",
        "check_route",
        says="do not add up to 1",
        replace={
            "return experts, weights / weights.sum(-1, keepdim=True), probabilities": "return experts, weights, probabilities"
        },
        also=("check_bias", "check_router_learns", "check_route_all"),
    ),
    Mutant(
        "The bias is in the weights",
        "check_bias",
        says="it decides the choice only",
        replace={"weights = probabilities.gather(-1, experts)": "weights = scores.gather(-1, experts)"},
    ),
    Mutant(
        "The bias is inside the softmax",
        "check_bias",
        says="the bias is inside the softmax",
        replace={
            "probabilities = F.linear(x, weight).softmax(-1)": (
                "probabilities = (F.linear(x, weight) + (0 if bias is None else bias)).softmax(-1)"
            ),
            "scores = probabilities if bias is None else probabilities + bias": "scores = probabilities",
        },
    ),
    Mutant(
        "The experts are sorted by their numbers",
        "check_route",
        says="and in another order",
        replace={"scores.topk(k, dim=-1).indices": "scores.topk(k, dim=-1).indices.sort(-1).values"},
        also=("check_bias", "check_router_learns", "check_route_all"),
    ),
    Mutant(
        "The softmax is over the tokens",
        "check_route",
        says="the softmax is over the tokens",
        replace={"F.linear(x, weight).softmax(-1)": "F.linear(x, weight).softmax(0)"},
        also=("check_bias", "check_router_learns", "check_route_all"),
    ),
    # -- order
    Mutant(
        "Experts without tokens at the end have no count",
        "check_order",
        says="see minlength",
        replace={"flat.bincount(minlength=num_experts)": "flat.bincount()"},
    ),
    Mutant(
        "The choices are numbered choice by choice, not token by token",
        "check_order",
        says="number the choices as experts.flatten() does",
        replace={"flat = experts.flatten()": "flat = experts.T.flatten()"},
    ),
    # -- experts
    Mutant(
        "Experts without rows are skipped, and the next ones get their weights",
        "check_experts",
        says="compute with the weights of others",
        replace={
            "for each in zip(parts, first, second)": "for each in zip([part for part in parts if len(part)], first, second)"
        },
        also=("check_only_own_rows",),
    ),
    Mutant(
        "There are four experts, whatever the weights say",
        "check_experts",
        says="the result of run_experts has shape",
        replace={"for each in zip(parts, first, second)": "for each in zip(parts[:4], first, second)"},
    ),
    Mutant(
        "Each row is multiplied alone",
        "check_only_own_rows",
        says="an expert multiplies all its rows at once",
        replace={
            "return torch.cat([expert(*each) for each in zip(parts, first, second)])": """
            each = [expert(row[None], *weights) for part, *weights in zip(parts, first, second) for row in part]
            return torch.cat(each)
            """
        },
    ),
    Mutant(
        "Each row gets a copy of the weights of its expert",
        "check_only_own_rows",
        says="give each expert its rows",
        replace={
            """
            parts = rows.split(counts.tolist())
            return torch.cat([expert(*each) for each in zip(parts, first, second)])
            """: """
            owner = torch.arange(len(counts)).repeat_interleave(counts)
            inside = F.silu((rows.unsqueeze(-1) * first[owner]).sum(1))
            return (inside.unsqueeze(-1) * second[owner]).sum(1)
            """
        },
    ),
    Mutant(
        "All experts compute all rows, and a mask selects the results",
        "check_only_own_rows",
        says="not all rows with a mask",
        replace={
            """
            parts = rows.split(counts.tolist())
            return torch.cat([expert(*each) for each in zip(parts, first, second)])
            """: """
            owner = torch.arange(len(counts)).repeat_interleave(counts)
            return sum(expert(rows, first[e], second[e]) * (owner == e).unsqueeze(-1) for e in range(len(counts)))
            """,
        },
    ),
    Mutant(
        "All experts compute all rows, and where selects the results",
        "check_only_own_rows",
        says="not all rows with a mask",
        replace={
            """
            parts = rows.split(counts.tolist())
            return torch.cat([expert(*each) for each in zip(parts, first, second)])
            """: """
            owner, out = torch.arange(len(counts)).repeat_interleave(counts), torch.zeros_like(rows)
            for e in range(len(counts)):
                out = torch.where((owner == e).unsqueeze(-1), expert(rows, first[e], second[e]), out)
            return out
            """,
        },
    ),
    Mutant(
        "A token has only its last row",
        "check_combine",
        says="a token has only one of its rows",
        replace={"index_add(0, order // k, weighted)": "index_copy(0, order // k, weighted)"},
    ),
    Mutant(
        "The weights are in the order of the choices, the rows are sorted",
        "check_combine",
        says="row i has the weight of choice order[i]",
        replace={"weights.flatten()[order]": "weights.flatten()[: len(order)]"},
    ),
    Mutant(
        "All weights multiply the rows, of which some are dropped",
        "check_combine",
        says="row i has the weight of choice order[i]",
        replace={"weights.flatten()[order]": "weights.flatten()"},
    ),
    Mutant(
        "The token of a choice is its number modulo T",
        "check_combine",
        says="not to c % T",
        replace={"index_add(0, order // k, weighted)": "index_add(0, order % tokens, weighted)"},
    ),
    Mutant(
        "The rows are viewed as (T, k, h), although some are dropped",
        "check_combine",
        says="without a view (T, k, h)",
        replace={
            "return rows.new_zeros(tokens, rows.shape[1]).index_add(0, order // k, weighted)": (
                "return weighted[order.argsort()].view(tokens, k, -1).sum(1)"
            )
        },
    ),
    # -- capacity
    Mutant(
        "The capacity is a share of the tokens, not of the choices",
        "check_capacity_of",
        says="T tokens have T·k choices",
        replace={"math.ceil(factor * tokens * k / num_experts)": "math.ceil(factor * tokens / num_experts)"},
    ),
    Mutant(
        "The capacity is rounded down",
        "check_capacity_of",
        says="round up",
        replace={"math.ceil(factor * tokens * k / num_experts)": "int(factor * tokens * k / num_experts)"},
    ),
    Mutant(
        "The experts keep their last rows",
        "check_capacity",
        says="they keep the first ones",
        replace={"order[place < capacity]": "order[place >= (counts - capacity).repeat_interleave(counts)]"},
    ),
    Mutant(
        "The counts are limited in place",
        "check_capacity",
        says="keep_within changes its arguments",
        replace={"counts.clamp(max=capacity)": "counts.clamp_(max=capacity)"},
    ),
    # -- balance
    Mutant(
        "The shares are those of one rank's choices",
        "check_balance_loss",
        says="add the counts of all ranks first",
        replace={"dist.all_reduce(counts, group=group)": ""},
        also=("check_balance_traffic",),
    ),
    Mutant(
        "The counts of all ranks are divided by the choices of one",
        "check_balance_loss",
        says="add up to 2, not to 1",
        replace={"counts.to(probabilities) / counts.sum()": "counts.to(probabilities) / experts.numel()"},
        also=("check_balance_traffic",),
    ),
    Mutant(
        "The bias of popular experts rises",
        "check_update_bias",
        says="the bias falls for idle experts",
        replace={"load.mean() - load": "load - load.mean()"},
    ),
    Mutant(
        "The balance loss adds the counts of all ranks, the group is forgotten",
        "check_balance_loss",
        says="give group=group to the all-reduce",
        replace={"dist.all_reduce(counts, group=group)": "dist.all_reduce(counts)"},
    ),
    Mutant(
        "The balance bias adds the counts of all ranks, the group is forgotten",
        "check_update_bias",
        says="give group=group to the all-reduce",
        replace={"dist.all_reduce(load, group=group)": "dist.all_reduce(load)"},
    ),
    Mutant(
        "The bias follows the size of the load",
        "check_update_bias",
        says="only its sign counts",
        replace={"torch.sign(load.mean() - load)": "(load.mean() - load)"},
    ),
    # -- exchange
    Mutant(
        "The counts are not sent",
        "check_counts",
        says="they must be sent",
        replace={
            """
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=group)
            """: "received = counts",
        },
    ),
    Mutant(
        "The counts are exchanged with all ranks, the group is forgotten",
        "check_counts",
        says="give group=group to the all-to-all",
        replace={
            "dist.all_to_all_single(received, counts, group=group)": "dist.all_to_all_single(received, counts)"
        },
    ),
    Mutant(
        "The counts of all ranks are gathered",
        "check_counts",
        says="an all-to-all is enough",
        answer="""
        def exchange_counts(counts, group=None):
            world = dist.get_world_size(group)
            parts = [torch.empty_like(counts) for _ in range(world)]
            dist.all_gather(parts, counts, group=group)
            return torch.stack(parts).view(world, world, -1)[:, dist.get_rank(group)].contiguous()
        """,
    ),
    Mutant(
        "The rows are exchanged with all ranks, the group is forgotten",
        "check_all_to_all",
        says="give the group for whose ranks the sizes are",
        replace={"rows.contiguous(), receive, send, group=group)": "rows.contiguous(), receive, send)"},
    ),
    Mutant(
        "The sizes of what is sent and of what is received are swapped",
        "check_all_to_all",
        says="the third argument has the rows that are received, the fourth those that are sent",
        replace={
            "rows.contiguous(), receive, send, group=group)": "rows.contiguous(), send, receive, group=group)"
        },
        also=("check_exchange_traffic", "check_exchange_three_ranks"),
    ),
    Mutant(
        "The backward returns the gradient as it is",
        "check_all_to_all",
        says="the gradient of the rows of rank",
        replace={
            "return back, None, None, None": "return (grad.repeat(len(back), 1)[: len(back)] if len(grad) else back), None, None, None"
        },
        also=("check_exchange_traffic", "check_exchange_three_ranks"),
    ),
    Mutant(
        "The gradient is sent as it comes, with strides that all-to-all refuses",
        "check_all_to_all",
        says="send tensor.contiguous()",
        replace={
            "dist.all_to_all_single(back, grad.contiguous(), ctx.send": "dist.all_to_all_single(back, grad, ctx.send"
        },
        also=("check_exchange_traffic", "check_exchange_three_ranks"),
    ),
    # -- layer
    Mutant(
        "The rows are given to the experts in the order of their sources",
        "check_layer",
        says="received rows are sorted by source",
        replace={
            "results = run_experts(rows[by_expert], loads, first, second)": "results = run_experts(rows, loads, first, second)",
            "as_received = torch.empty_like(results).index_copy(0, by_expert, results)": "as_received = results",
        },
        also=("check_layer_traffic",),
    ),
    Mutant(
        "The results get the order itself, not its inverse",
        "check_layer",
        says="its inverse is needed",
        replace={"torch.empty_like(results).index_copy(0, by_expert, results)": "results[by_expert]"},
        also=("check_layer_traffic",),
    ),
    Mutant(
        "The counts of the received rows are read expert by expert",
        "check_layer",
        says="flatten it as it is",
        replace={"repeat_interleave(received.flatten())": "repeat_interleave(received.T.flatten())"},
        also=("check_layer_traffic",),
    ),
    Mutant(
        "The numbers of choices are taken for tokens",
        "check_layer",
        says="the token of choice c is c // k",
        replace={
            "AllToAll.apply(x[order // k], send, receive, group)": "AllToAll.apply(x[order], send, receive, group)"
        },
        also=("check_layer_traffic", "check_layer_three_ranks"),
    ),
    Mutant(
        "The results travel back with the two lists as on the way there",
        "check_layer_traffic",
        says="a group of all ranks fails as well",
        replace={
            "AllToAll.apply(as_received, receive, send, group)": "AllToAll.apply(as_received, send, receive, group)"
        },
        also=("check_layer", "check_layer_three_ranks"),
    ),
    Mutant(
        "The layer communicates over all ranks, the group is forgotten",
        "check_layer_traffic",
        says="probably without the group",
        replace={
            "exchange_counts(counts, group)": "exchange_counts(counts)",
            "AllToAll.apply(x[order // k], send, receive, group)": "AllToAll.apply(x[order // k], send, receive, None)",
            "AllToAll.apply(as_received, receive, send, group)": "AllToAll.apply(as_received, receive, send, None)",
        },
    ),
    Mutant(
        "The layer divides its rows among all ranks, not among those of the group",
        "check_layer_traffic",
        says="dist.get_world_size(group)",
        replace={"counts.view(len(received), -1)": "counts.view(dist.get_world_size(), -1)"},
    ),
    Mutant(
        "The experts are gathered on every rank, and tokens stay",
        "check_layer_traffic",
        says="tokens travel to their experts",
        answer="""
        class Gathered(torch.autograd.Function):
            @staticmethod
            def forward(ctx, own, group):
                ctx.group, parts = group, [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, own.contiguous(), group=group)
                return torch.cat(parts)

            @staticmethod
            def backward(ctx, grad):
                total = grad.contiguous().clone()
                dist.all_reduce(total, group=ctx.group)
                return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].clone(), None

        def expert_parallel(x, router, first, second, k, group=None, bias=None):
            experts, weights, _ = route(x, router, k, bias)
            order, counts = sort_choices(experts, len(router))
            whole = Gathered.apply(first, group), Gathered.apply(second, group)
            return combine(run_experts(x[order // k], counts, *whole), order, weights)
        """,
    ),
    Mutant(
        "The rows travel by a plain collective, which has no backward",
        "check_layer",
        says="send rows by AllToAll.apply",
        replace={
            "rows = AllToAll.apply(x[order // k], send, receive, group)": """
            rows = x.new_empty(sum(receive), x.shape[1])
            dist.all_to_all_single(rows, x[order // k].contiguous(), receive, send, group=group)
            """,
        },
        also=("check_layer_traffic", "check_layer_three_ranks"),
    ),
    # -- gradients
    Mutant(
        "A copy of the gradients is reduced, and they are unchanged",
        "check_expert_gradients",
        says="the gradients of experts on rank 0 are unchanged",
        replace={
            """
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size()
            """: """
            copy = parameter.grad.clone()
            dist.all_reduce(copy, group=group)
            copy /= dist.get_world_size()
            """,
        },
        also=("check_shared", "check_grid"),
    ),
    Mutant(
        "The gradients of experts are averaged over all ranks",
        "check_expert_gradients",
        says="its neighbours store other experts",
        replace={"(experts, replicas)": "(experts, None)"},
        also=("check_grid",),
    ),
    Mutant(
        "The gradients of experts are divided by the number of replicas",
        "check_expert_gradients",
        says="divide by the number of all ranks",
        replace={"parameter.grad /= dist.get_world_size()": "parameter.grad /= dist.get_world_size(group)"},
        also=("check_grid",),
    ),
    Mutant(
        "The gradients of shared parameters are averaged over the replicas",
        "check_shared",
        says="averaged over its replicas only",
        replace={
            "(shared, None)": "(shared, replicas)",
            "parameter.grad /= dist.get_world_size()": "parameter.grad /= dist.get_world_size() if own is experts else dist.get_world_size(group)",
        },
        also=("check_grid",),
    ),
    Mutant(
        "The gradients of experts are not added over their replicas",
        "check_expert_gradients",
        says="are not added over its replicas",
        replace={"(experts, replicas)": "(experts, dist.new_subgroups(group_size=1)[0])"},
        also=("check_grid",),
    ),
    Mutant(
        "The gradients of experts are not divided",
        "check_expert_gradients",
        says="and not divided",
        replace={
            "parameter.grad /= dist.get_world_size()": "parameter.grad /= dist.get_world_size() if own is shared else 1",
        },
        also=("check_grid",),
    ),
    Mutant(
        "Parameters without a gradient are not skipped",
        "check_shared",
        says="has None: skip it",
        replace={"if parameter.grad is not None:": "if True:"},
        also=("check_expert_gradients",),
    ),
    # -- padded
    Mutant(
        "The buffer is viewed as the experts need it, without a transposition",
        "check_padded",
        says="A view does not exchange dimensions",
        replace={
            "received.transpose(0, 1).flatten(1, 2)": "received.reshape(len(first), world * capacity, -1)",
            "results.unflatten(1, (world, capacity)).transpose(0, 1).reshape(len(buffer), -1)": "results.reshape(len(buffer), -1)",
        },
        also=("check_fixed_shapes",),
    ),
    Mutant(
        "The results are not transposed back",
        "check_padded",
        says="before the way back",
        replace={
            "results.unflatten(1, (world, capacity)).transpose(0, 1).reshape(len(buffer), -1)": "results.reshape(len(buffer), -1)",
        },
        also=("check_fixed_shapes",),
    ),
    Mutant(
        "No row is dropped, and rows leave the part of their expert",
        "check_padded",
        says="without keep_within",
        replace={"order, counts = keep_within(order, counts, capacity)": ""},
        also=("check_fixed_shapes",),
    ),
    Mutant(
        "The capacity of the buffers is that of the worst case, so nothing is dropped",
        "check_padded",
        says="no row is dropped",
        replace={
            "experts, weights, _ = route(x, router, k)": """
            experts, weights, _ = route(x, router, k)
            capacity = len(x) * k
            """,
        },
        also=("check_fixed_shapes",),
    ),
    Mutant(
        "The buffers travel over all ranks, the group is forgotten",
        "check_fixed_shapes",
        says="probably without the group",
        replace={
            "received = AllToAll.apply(buffer, equal, equal, group)": "received = AllToAll.apply(buffer, equal, equal, None)",
            "combine(AllToAll.apply(results, equal, equal, group)": "combine(AllToAll.apply(results, equal, equal, None)",
            "dist.get_world_size(group)": "dist.get_world_size()",
        },
    ),
    Mutant(
        "The results travel back by a plain collective, which has no backward",
        "check_padded",
        says="send rows by AllToAll.apply",
        replace={
            "return combine(AllToAll.apply(results, equal, equal, group)[slot], order, weights)": """
            back = torch.empty_like(results)
            dist.all_to_all_single(back, results.detach().contiguous(), group=group)
            return combine(back[slot], order, weights)
            """,
        },
        also=("check_fixed_shapes",),
    ),
    # -- quiz
    Mutant(
        "Wrong answer on the division of the gradients of experts",
        "quiz_q3",
        says="already the sum over the tokens",
        replace={'"q3": "a"': '"q3": "b"'},
    ),
]

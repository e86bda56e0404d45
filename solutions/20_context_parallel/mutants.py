"""Planted mistakes of Context parallelism, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- block
    Mutant(
        "The scores are not scaled",
        "check_block_output",
        says="not divided by the square root of d",
        replace={"scores = q @ k.mT / q.shape[-1] ** 0.5": "scores = q @ k.mT"},
        also=("check_block_lse", "check_block_blind", "check_block_large"),
    ),
    Mutant(
        "A large negative number hides the keys",
        "check_block_blind",
        says="is the mean of v",
        replace={"scores = scores.masked_fill(~mask, -math.inf)": "scores = scores.masked_fill(~mask, -1e9)"},
    ),
    Mutant(
        "A large negative number is added to the scores of hidden keys",
        "check_block_blind",
        says="is attention to all keys",
        replace={"scores = scores.masked_fill(~mask, -math.inf)": "scores = scores - 1e9 * (~mask)"},
    ),
    Mutant(
        "Hidden keys count in the sum",
        "check_block_output",
        says="hidden keys count in the sum",
        answer="""
        def block_attention(q, k, v, mask):
            scores = q @ k.mT / q.shape[-1] ** 0.5
            return scores.softmax(-1) * mask @ v, scores.masked_fill(~mask, -math.inf).logsumexp(-1)
        """,
        also=("check_block_blind", "check_block_large"),
    ),
    Mutant(
        "A query without a key is NaN",
        "check_block_blind",
        says="a query that sees no key is NaN",
        replace={"lse.masked_fill(lse == -math.inf, 0)  # -inf - -inf is no number": "lse"},
    ),
    Mutant(
        "The attention of PyTorch",
        "check_block_output",
        says="The text excludes ready attention",
        replace={
            "return (scores - shift.unsqueeze(-1)).exp() @ v, lse": """
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.masked_fill((lse == -math.inf).unsqueeze(-1), 0), lse
            """
        },
        also=("check_block_lse", "check_block_blind", "check_block_large"),
    ),
    # -- merge
    Mutant(
        "The mean of the two outputs",
        "check_merge",
        says="the mean of the two outputs",
        replace={"return first * out + second * block_out, total": "return (out + block_out) / 2, total"},
        also=("check_merge_many", "check_merge_large", "check_merge_nothing"),
    ),
    Mutant(
        "The shares do not add up to 1",
        "check_merge",
        says="do not add up to 1",
        replace={
            "(part - shift).exp()": "(part - torch.maximum(lse, block_lse).masked_fill(total == -math.inf, 0)).exp()"
        },
        also=("check_merge_many", "check_merge_large"),
    ),
    Mutant(
        "The two lse are added",
        "check_merge",
        says="the two lse are added, so out has wrong shares",
        replace={"torch.logaddexp(lse, block_lse)": "lse + block_lse"},
        also=("check_merge_many", "check_merge_large", "check_merge_nothing"),
    ),
    Mutant(
        "Exponentials before differences",
        "check_merge_large",
        says="Form the differences of lse before exp",
        answer="""
        def merge(out, lse, block_out, block_lse):
            first, second = lse.exp().unsqueeze(-1), block_lse.exp().unsqueeze(-1)
            total = first + second
            return (first * out + second * block_out) / total.where(total > 0, 1), total.squeeze(-1).log()
        """,
    ),
    Mutant(
        "The lse of the last block is returned",
        "check_merge",
        says="that of one part alone",
        replace={
            "return first * out + second * block_out, total": "return first * out + second * block_out, block_lse"
        },
        also=("check_merge_many", "check_merge_large", "check_merge_nothing"),
    ),
    Mutant(
        "Two parts without a key are NaN",
        "check_merge_nothing",
        says="two parts without a key give NaN",
        replace={"shift = total.masked_fill(total == -math.inf, 0)": "shift = total"},
    ),
    # -- visible
    Mutant(
        "A query does not see its key",
        "check_visible_contiguous",
        says="is not among the keys :last",
        replace={
            "(q_positions < k_positions[0])": "(q_positions <= k_positions[0])",
            "(k_positions <= q_positions[-1])": "(k_positions < q_positions[-1])",
        },
        also=("check_visible_gaps", "check_visible_other_sizes"),
    ),
    Mutant(
        "A query does not see the first key",
        "check_visible_contiguous",
        says="is not among the queries first:",
        replace={"(q_positions < k_positions[0])": "(q_positions <= k_positions[0])"},
        also=("check_visible_gaps", "check_visible_other_sizes"),
    ),
    Mutant(
        "All queries of a block in which something is visible",
        "check_visible_gaps",
        says="the first of these queries see no key",
        replace={"return (first, last) if last else None": "return (0, last) if last else None"},
        also=("check_visible_other_sizes",),
    ),
    # -- ring
    Mutant(
        "A rank that sees nothing does not shift",
        "check_ring_contiguous",
        says="Every rank shifts in every step",
        replace={
            "shift = start_shift(kv) if step < world - 1 else None": "shift = None",
            "if part is not None:": """
            if part is not None:
                shift = start_shift(kv) if step < world - 1 else None
            """,
        },
    ),
    Mutant(
        "The mask has the positions of this rank's keys",
        "check_ring_contiguous",
        says="uses the mask of its block for all blocks",
        replace={"positions[owner][:last]": "positions[rank][:last]"},
        question="ring",
        also=("check_ring_computes", "check_ring_traffic"),
    ),
    Mutant(
        "All keys and values are gathered",
        "check_ring_traffic",
        says="no rank gathers",
        answer="""
        def ring_forward(q, k, v, positions):
            rank, world = dist.get_rank(), dist.get_world_size()
            kv = torch.stack((k, v))
            whole = [torch.empty_like(kv) for _ in range(world)]
            dist.all_gather(whole, kv)
            keys, values = torch.cat(whole, 3)
            return block_attention(q, keys, values, positions[rank][:, None] >= positions.flatten())
        """,
        also=("check_ring_contiguous", "check_ring_computes"),
    ),
    Mutant(
        "Every rank sends its block to all ranks",
        "check_ring_contiguous",
        says="in a ring a rank sends to one neighbour",
        replace={
            "shift = start_shift(kv) if step < world - 1 else None": """
            shift = None
            if step < world - 1:
                source = (rank - step - 1) % world
                arriving = torch.empty_like(kv)
                ops = [dist.P2POp(dist.isend, torch.stack((k, v)), (rank + step + 1) % world)]
                shift = dist.batch_isend_irecv([*ops, dist.P2POp(dist.irecv, arriving, source)])
            """,
            "kv = shift.wait()": """
            for work in shift:
                work.wait()
            kv = arriving
            """,
        },
        also=("check_ring_computes", "check_ring_traffic"),
    ),
    Mutant(
        "The block is sent in the last step too",
        "check_ring_traffic",
        says="after the last step no rank needs the block",
        replace={"start_shift(kv) if step < world - 1 else None": "start_shift(kv)"},
    ),
    Mutant(
        "The causal mask is forgotten inside the rectangle",
        "check_ring_contiguous",
        says="the causal mask is needed as well",
        replace={
            "mask = positions[rank][first:, None] >= positions[owner][:last]": (
                "mask = torch.ones(len(positions[rank]) - first, last, dtype=torch.bool)"
            ),
        },
        question="ring",
        also=("check_ring_computes", "check_ring_traffic"),
    ),
    Mutant(
        "The owner of a block is counted in the other direction",
        "check_ring_contiguous",
        says="in step i the owner is (rank - i) % world",
        replace={"owner = (rank - step) % world": "owner = (rank + step) % world"},
        question="ring",
        also=("check_ring_computes", "check_ring_traffic"),
    ),
    Mutant(
        "The ring begins with lse 0",
        "check_ring_contiguous",
        says="begin with -inf",
        replace={"q.new_full(q.shape[:-1], -math.inf)": "q.new_zeros(q.shape[:-1])"},
        also=("check_ring_computes", "check_ring_traffic"),
    ),
    Mutant(
        "The whole rectangle of each block is computed",
        "check_ring_computes",
        says="more than `visible` says",
        replace={"part = visible(positions[rank], positions[owner])": "part = 0, len(positions[owner])"},
        question="ring",
    ),
    Mutant(
        "Only blocks of which nothing is visible are left out",
        "check_ring_computes",
        says="the queries first: and the keys :last",
        replace={"first, last = part": "first, last = 0, len(positions[owner])"},
        question="ring",
    ),
    Mutant(
        "The block is merged with all queries",
        "check_ring_computes",
        says="give merge out and lse of these queries",
        replace={
            "out[:, :, first:], lse[:, :, first:] = merge(out[:, :, first:], lse[:, :, first:], *block)": "out, lse = merge(out, lse, *block)"
        },
        also=("check_ring_traffic",),
    ),
    Mutant(
        "k and v are two messages",
        "check_ring_traffic",
        says="k and v travel as one tensor",
        replace={
            "shift = start_shift(kv) if step < world - 1 else None": (
                "shift = [start_shift(each) for each in kv] if step < world - 1 else None"
            ),
            "kv = shift.wait()": "kv = torch.stack([each.wait() for each in shift])",
        },
    ),
    Mutant(
        "The next block is awaited before this one is used",
        "check_ring_contiguous",
        says="one block too far",
        replace={
            "part = visible(positions[rank], positions[owner])": """
            kv = kv if shift is None else shift.wait()
            part = visible(positions[rank], positions[owner])
            """,
            """
            if shift is not None:
                kv = shift.wait()
            """: "",
        },
        question="ring",
        also=("check_ring_computes", "check_ring_traffic"),
    ),
    Mutant(
        "The block that arrives is dropped",
        "check_ring_contiguous",
        says="the next block is what wait() returns",
        replace={"kv = shift.wait()": "shift.wait()"},
        also=("check_ring_computes", "check_ring_traffic"),
    ),
    # -- gradient
    Mutant(
        "The gradient of the queries is not divided by the square root of d",
        "check_gradient",
        says="dq is not divided by the square root of d",
        replace={
            "return grad_scores @ k, grad_scores.mT @ q": "return grad_scores / scale @ k, grad_scores.mT @ q"
        },
        also=("check_gradient_hidden", "check_gradient_blocks"),
    ),
    Mutant(
        "Two blocks without the square root of d",
        "check_gradient_blocks",
        says="dq is not divided by the square root of d",
        replace={"(grad @ v.mT - row_sums) * scale": "(grad @ v.mT - row_sums)"},
        also=("check_gradient", "check_gradient_hidden"),
    ),
    Mutant(
        "The mask is forgotten in backward",
        "check_gradient",
        says="the mask belongs into backward as well",
        replace={"scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)": "scores = q @ k.mT * scale"},
        also=("check_gradient_hidden", "check_gradient_blocks"),
    ),
    Mutant(
        "D of a block has the probabilities of this block alone",
        "check_gradient_blocks",
        says="D is the sum of grad * out with the given out",
        replace={
            "row_sums = (grad * out).sum(-1, keepdim=True)": "row_sums = (probabilities * (grad @ v.mT)).sum(-1, keepdim=True)"
        },
    ),
    Mutant(
        "The softmax of the block instead of the whole row",
        "check_gradient_blocks",
        says="exp(S - lse) with the given lse",
        replace={"probabilities = (scores - lse.unsqueeze(-1)).exp()": "probabilities = scores.softmax(-1)"},
    ),
    Mutant(
        "The gradients of v and k are exchanged",
        "check_gradient",
        says="return dq, dk, dv in this order",
        replace={
            "return grad_scores @ k, grad_scores.mT @ q, probabilities.mT @ grad": (
                "return grad_scores @ k, probabilities.mT @ grad, grad_scores.mT @ q"
            )
        },
        also=("check_gradient_hidden", "check_gradient_blocks"),
    ),
    Mutant(
        "The mask multiplies the probabilities",
        "check_gradient_hidden",
        says="inf · 0 is NaN",
        replace={
            "scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)": "scores = q @ k.mT * scale",
            "probabilities = (scores - lse.unsqueeze(-1)).exp()": "probabilities = (scores - lse.unsqueeze(-1)).exp() * mask",
        },
    ),
    # -- backward
    Mutant(
        "The gradients of keys stay on the rank that computes them",
        "check_backward_contiguous",
        says="the gradients of a block travel with it",
        replace={
            """
            dk[:, :, :last] += terms[1]
            dv[:, :, :last] += terms[2]
            """: """
            if owner == rank:
                home = terms[1], terms[2]
            """,
            "return dq, travelling[0], travelling[1]": "return dq, *home",
        },
        also=("check_backward_traffic", "check_backward_four_ranks"),
    ),
    Mutant(
        "The contributions are not added to what travels",
        "check_backward_contiguous",
        says="add to what travels, in place",
        replace={
            """
            dk[:, :, :last] += terms[1]
            dv[:, :, :last] += terms[2]
            """: """
            dk = torch.cat((dk[:, :, :last] + terms[1], dk[:, :, last:]), 2)
            dv = torch.cat((dv[:, :, :last] + terms[2], dv[:, :, last:]), 2)
            """,
        },
        also=("check_backward_traffic", "check_backward_four_ranks"),
    ),
    Mutant(
        "The gradients stop one rank before their home",
        "check_backward_contiguous",
        says="after N shifts it is at home",
        replace={
            "travelling = start_shift(travelling if step < world - 1 else travelling[2:]).wait()": """
            if step < world - 1:
                travelling = start_shift(travelling).wait()
            """,
            "return dq, travelling[0], travelling[1]": "return dq, travelling[2], travelling[3]",
        },
        also=("check_backward_traffic", "check_backward_four_ranks"),
    ),
    Mutant(
        "The last message has the keys and values too",
        "check_backward_traffic",
        says="are enough",
        replace={
            "start_shift(travelling if step < world - 1 else travelling[2:]).wait()": "start_shift(travelling).wait()",
            "return dq, travelling[0], travelling[1]": "return dq, travelling[2], travelling[3]",
        },
    ),
    Mutant(
        "dq has the contribution of the last block",
        "check_backward_contiguous",
        says="the contribution of the last block alone",
        replace={"dq[:, :, first:] += terms[0]": "dq[:, :, first:] = terms[0]"},
        also=("check_backward_traffic", "check_backward_four_ranks"),
    ),
    Mutant(
        "A rank that sees nothing does not shift in backward",
        "check_backward_contiguous",
        says="also one that computes nothing",
        replace={
            "dv[:, :, :last] += terms[2]": """
            dv[:, :, :last] += terms[2]
            travelling = start_shift(travelling if step < world - 1 else travelling[2:]).wait()
            """,
            "return dq, travelling[0], travelling[1]": """
            dk, dv = travelling
            return dq, dk, dv
            """,
            """
            travelling = start_shift(travelling if step < world - 1 else travelling[2:]).wait()
            """: "",
        },
    ),
    # -- zigzag
    Mutant(
        "Chunks r and r + N",
        "check_zigzag_chunks",
        says="the late one is 2N - 1 - r",
        replace={
            "torch.cat((chunks[:world], chunks.flip(0)[:world]), dim=1)": "torch.cat((chunks[:world], chunks[world:]), dim=1)"
        },
        also=("check_zigzag_balance",),
    ),
    Mutant(
        "The striped order",
        "check_zigzag_balance",
        says="all ranks see the same number",
        replace={
            "torch.cat((chunks[:world], chunks.flip(0)[:world]), dim=1)": "torch.arange(seq).view(-1, world).T.contiguous()"
        },
        also=("check_zigzag_chunks",),
    ),
    # -- loss
    Mutant(
        "The part is cut, then shifted",
        "check_shard_batch",
        says="the next token is on another rank",
        replace={
            "tokens[:, own_positions + 1]": "torch.cat((tokens[:, own_positions[1:]], tokens[:, own_positions[:1]]), 1)",
        },
        also=("check_context_model",),
    ),
    Mutant(
        "The inputs and targets are cut from the part",
        "check_shard_batch",
        says="one less than the rank has positions",
        replace={
            "return tokens[:, own_positions], tokens[:, own_positions + 1]": (
                "return tokens[:, own_positions[:-1]], tokens[:, own_positions[1:]]"
            ),
        },
        also=("check_context_model",),
    ),
    Mutant(
        "Each rank divides by the number of its tokens",
        "check_context_loss",
        says="divide by that of all ranks",
        replace={
            "valid = (targets != -100).sum()": """
            own = (targets != -100).sum().clamp(min=1)
            valid = own.clone()
            """,
            "return total / valid": "return total / own",
        },
        also=("check_context_model",),
    ),
    Mutant(
        "Each rank divides its mean by the number of ranks",
        "check_context_loss",
        says="divides its mean by the number of ranks",
        replace={
            """
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            valid = (targets != -100).sum()
            dist.all_reduce(valid)
            return total / valid
            """: "return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / dist.get_world_size()",
        },
        also=("check_context_model",),
    ),
    Mutant(
        "The share is multiplied by the number of ranks",
        "check_context_loss",
        says="multiplies its share by the number of ranks",
        replace={"return total / valid": "return total / valid * dist.get_world_size()"},
        also=("check_context_model",),
    ),
    Mutant(
        "The share is divided by the number of ranks",
        "check_context_loss",
        says="divides its share by the number of ranks as well",
        replace={"return total / valid": "return total / valid / dist.get_world_size()"},
        also=("check_context_model",),
    ),
    Mutant(
        "Every rank returns the whole loss",
        "check_context_loss",
        says="returns the whole loss",
        replace={
            "return total / valid": """
            whole = total.detach().clone()
            dist.all_reduce(whole)
            return total / valid + (whole - total.detach()) / valid
            """
        },
        also=("check_context_model",),
    ),
    Mutant(
        "A Llama with padding has the mean of the means",
        "check_context_model",
        says="the loss of the Llama is the mean of the means of the ranks",
        replace={
            "return total / valid": "return total / (targets != -100).sum().clamp(min=1) / dist.get_world_size()",
        },
        also=("check_context_loss",),
    ),
    Mutant(
        "The targets are not shifted",
        "check_shard_batch",
        says="the target of position i is the token i + 1",
        replace={"tokens[:, own_positions + 1]": "tokens[:, own_positions]"},
        also=("check_context_model",),
    ),
    Mutant(
        "Each rank computes the whole sequences",
        "check_context_model",
        says="each rank computes the whole sequences",
        answer="""
        def context_loss(logits, targets):
            import sys

            step = sys._getframe(1).f_locals
            if "tokens" not in step:
                valid = (targets != -100).sum()
                dist.all_reduce(valid)
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / valid
            model, tokens = step["model"], step["tokens"]
            for block in model.layers:
                del block.self_attn.attend
            labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == step["padding"], -100)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())
            return (loss + 0 * logits.sum()) / dist.get_world_size()
        """,
    ),
    # -- ulysses
    Mutant(
        "Heads are in the wrong order",
        "check_ulysses_layout",
        says="the right numbers in another order",
        replace={
            "return AllToAll.apply(parts).movedim(0, 1).flatten(1, 2)  # row j has the j-th group of heads": (
                "return AllToAll.apply(parts).permute(1, 2, 0, 3, 4).flatten(1, 2)"
            ),
        },
        also=("check_ulysses_attention", "check_ulysses_traffic", "check_ulysses_three_ranks"),
    ),
    Mutant(
        "Ulysses without the causal mask",
        "check_ulysses_attention",
        says="see later keys: attention is causal",
        replace={
            "F.scaled_dot_product_attention(q, k, v, is_causal=True)": "F.scaled_dot_product_attention(q, k, v)"
        },
        also=("check_ulysses_traffic", "check_ulysses_three_ranks"),
    ),
    Mutant(
        "The sequence is cut into every N-th token",
        "check_ulysses_layout",
        says="has every N-th token",
        replace={
            "x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)": "x.unflatten(2, (-1, dist.get_world_size())).movedim(3, 0)"
        },
        also=("check_ulysses_attention", "check_ulysses_traffic", "check_ulysses_three_ranks"),
    ),
    Mutant(
        "The result is not exchanged back",
        "check_ulysses_attention",
        says="exchange it back by heads_to_sequence",
        replace={
            "return heads_to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True))": (
                "return F.scaled_dot_product_attention(q, k, v, is_causal=True)"
            )
        },
        also=("check_ulysses_traffic", "check_ulysses_three_ranks"),
    ),
    Mutant(
        "The backward of the exchange divides by the number of ranks",
        "check_ulysses_attention",
        says="divides by nothing",
        replace={"return exchanged(grad)": "return exchanged(grad) / dist.get_world_size()"},
        also=("check_ulysses_traffic", "check_ulysses_three_ranks"),
    ),
    Mutant(
        "The backward of the exchange does nothing",
        "check_ulysses_attention",
        says="each part of the gradient returns to the rank that sent it",
        replace={"return exchanged(grad)": "return grad"},
        also=("check_ulysses_traffic", "check_ulysses_three_ranks"),
    ),
    Mutant(
        "Every rank gathers the whole sequence",
        "check_ulysses_attention",
        says="nothing is gathered",
        answer="""
        class Whole(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, x.contiguous())
                return torch.cat(parts, 2)

            @staticmethod
            def backward(ctx, grad):
                grad = grad.contiguous()
                dist.all_reduce(grad)
                return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]

        def ulysses_attention(q, k, v):
            whole = F.scaled_dot_product_attention(*map(Whole.apply, (q, k, v)), is_causal=True)
            return whole.chunk(dist.get_world_size(), 2)[dist.get_rank()]
        """,
        also=("check_ulysses_traffic", "check_ulysses_three_ranks"),
    ),
    Mutant(
        "The queries are exchanged, returned and exchanged again",
        "check_ulysses_traffic",
        says="are enough: q, k, v and the output",
        replace={
            "q, k, v = (sequence_to_heads(tensor) for tensor in (q, k, v))": """
            q = heads_to_sequence(sequence_to_heads(q))
            q, k, v = (sequence_to_heads(tensor) for tensor in (q, k, v))
            """
        },
    ),
    # -- bytes
    Mutant(
        "The gradients of keys travel N - 1 times",
        "check_ring_sent",
        says="dk and dv travel N times",
        replace={"return 2 * own * (2 * (world - 1) + world)": "return 6 * own * (world - 1)"},
    ),
    Mutant(
        "Keys travel N times in backward",
        "check_ring_sent",
        says="only dk and dv travel N times",
        replace={"return 2 * own * (2 * (world - 1) + world)": "return 2 * own * (3 * world - 1)"},
    ),
    Mutant(
        "Ulysses sends the few heads of keys without copies",
        "check_few_heads_sent",
        says="each rank needs a copy of one",
        replace={"2 * max(kv_heads, world)": "2 * kv_heads"},
    ),
]

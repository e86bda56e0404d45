# Right and unusual tensor parallelism.

# == block_by_hand: the block from linear layers, without the functions of the lab
# %% model
from dlo_lib.models.llama import apply_rope

_PLAN = {"o_proj": 1, "down_proj": 1, "input_layernorm": None, "post_attention_layernorm": None, "norm": None}


def shard_dim(name):
    return _PLAN.get(name.split(".")[-2], 0)


def parallel_block(x, block, cos, sin, group=None):
    own = block.self_attn
    normed = copy_to_ranks(block.input_layernorm(x), group)
    q, k, v = (
        (normed @ weight.T).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
        for weight in (own.q_proj.weight, own.k_proj.weight, own.v_proj.weight)
    )
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + sum_over_ranks(out.transpose(1, 2).flatten(2) @ own.o_proj.weight.T, group)
    normed, mlp = copy_to_ranks(block.post_attention_layernorm(x), group), block.mlp
    inner = F.silu(normed @ mlp.gate_proj.weight.T) * (normed @ mlp.up_proj.weight.T)
    return x + sum_over_ranks(inner @ mlp.down_proj.weight.T, group)


# == dropout_by_rows: all masks are drawn from one generator, and each rank takes its own
# %% dropout
def dropout_on_ranks(x, p, differs, generator, group=None):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    drawn = torch.rand((world, *x.shape), generator=generator)
    return torch.where(drawn[rank if differs else 0] < p, torch.zeros_like(x), x / (1 - p))


# == dropout_by_bernoulli: a state of the common generator, moved by the rank
# %% dropout
def dropout_on_ranks(x, p, differs, generator, group=None):
    number = int(torch.randint(2**31, (1,), generator=generator))
    own = torch.Generator().manual_seed(number)
    for _ in range(dist.get_rank(group) if differs else 0):
        torch.rand(x.numel(), generator=own)
    return x * torch.empty_like(x).bernoulli_(1 - p, generator=own) / (1 - p)

"""What the norms keep taken to be in bf16."""

QUESTION = "block"
LOSES = 1
FAILS = "check_block_residual"
SAYS = "two fp32 tensors"


def block_bytes(config, batch, seq):
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * (2 + 2) * config.hidden
    copies = 2 * (3 + 2) * config.hidden
    attention = 2 * (2 * queries + 2 * keys)
    mlp = 2 * 4 * config.intermediate
    return batch * seq * (norms + copies + attention + mlp)

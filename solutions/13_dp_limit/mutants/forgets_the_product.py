"""The product of silu(gate) and up left out of what the MLP keeps."""

QUESTION = "block"
LOSES = 2
FAILS = "check_block_mlp"
SAYS = "and their product"


def block_bytes(config, batch, seq):
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * (4 + 4) * config.hidden
    copies = 2 * (3 + 2) * config.hidden
    attention = 2 * (2 * queries + 2 * keys)
    mlp = 2 * 3 * config.intermediate
    return batch * seq * (norms + copies + attention + mlp)

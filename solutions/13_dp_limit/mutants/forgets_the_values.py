"""Keys counted, values not."""

QUESTION = "block"
LOSES = 1
FAILS = "check_block_keys"
SAYS = "Keys and values are kept"


def block_bytes(config, batch, seq):
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * (4 + 4) * config.hidden
    copies = 2 * (3 + 2) * config.hidden
    attention = 2 * (2 * queries + keys)
    mlp = 2 * 4 * config.intermediate
    return batch * seq * (norms + copies + attention + mlp)

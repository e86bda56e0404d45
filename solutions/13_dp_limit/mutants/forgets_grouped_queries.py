"""Keys and values as wide as the queries."""

QUESTION = "parameters"
LOSES = 1
FAILS = "check_attention"
SAYS = "keys and values num_kv_heads"


def count_parameters(config):
    table = config.vocab_size * config.hidden
    queries = config.num_heads * config.head_dim
    return {
        "embedding": table,
        "attention": config.num_layers * config.hidden * 4 * queries,
        "mlp": config.num_layers * 3 * config.hidden * config.intermediate,
        "norms": (2 * config.num_layers + 1) * config.hidden,
        "head": 0 if config.tied_embeddings else table,
    }

"""A tied output projection counted as parameters of its own."""

QUESTION = "parameters"
LOSES = 1
FAILS = "check_tied"
SAYS = "is the embedding itself"


def count_parameters(config):
    table = config.vocab_size * config.hidden
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "embedding": table,
        "attention": config.num_layers * config.hidden * (2 * queries + 2 * keys),
        "mlp": config.num_layers * 3 * config.hidden * config.intermediate,
        "norms": (2 * config.num_layers + 1) * config.hidden,
        "head": table,
    }

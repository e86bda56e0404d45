"""Heads taken to be hidden / num_heads wide."""

QUESTION = "parameters"
LOSES = 2
FAILS = "check_wide_heads"
SAYS = "need not be hidden"


def count_parameters(config):
    table = config.vocab_size * config.hidden
    queries, keys = config.hidden, config.hidden * config.num_kv_heads // config.num_heads
    return {
        "embedding": table,
        "attention": config.num_layers * config.hidden * (2 * queries + 2 * keys),
        "mlp": config.num_layers * 3 * config.hidden * config.intermediate,
        "norms": (2 * config.num_layers + 1) * config.hidden,
        "head": 0 if config.tied_embeddings else table,
    }

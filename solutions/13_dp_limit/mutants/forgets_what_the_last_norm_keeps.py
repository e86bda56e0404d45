"""Only the blocks counted."""

QUESTION = "activations"
LOSES = 1
FAILS = "check_last_norm"
SAYS = "The last norm keeps"


def activation_bytes(config, batch, seq, checkpointing=False):
    residual = 4 * batch * seq * config.hidden
    kept = residual if checkpointing else block_bytes(config, batch, seq)
    return {"activations": config.num_layers * kept + 0, "logits": 4 * batch * seq * config.vocab_size}

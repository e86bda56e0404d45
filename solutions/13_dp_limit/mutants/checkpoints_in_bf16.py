"""A checkpointed block's input taken to be in bf16."""

QUESTION = "activations"
LOSES = 1
FAILS = "check_checkpointing"
SAYS = "each keeps its input"


def activation_bytes(config, batch, seq, checkpointing=False):
    residual = 4 * batch * seq * config.hidden
    kept = residual // 2 if checkpointing else block_bytes(config, batch, seq)
    return {"activations": config.num_layers * kept + 2 * residual, "logits": 4 * batch * seq * config.vocab_size}

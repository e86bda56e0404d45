"""The logits left in bf16 for the loss."""

QUESTION = "activations"
LOSES = 1
FAILS = "check_logits"
SAYS = "three tensors of your logits"


def activation_bytes(config, batch, seq, checkpointing=False):
    residual = 4 * batch * seq * config.hidden
    kept = residual if checkpointing else block_bytes(config, batch, seq)
    return {"activations": config.num_layers * kept + 2 * residual, "logits": 2 * batch * seq * config.vocab_size}

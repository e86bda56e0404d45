"""The bf16 copies of checkpointed blocks kept into backward."""

QUESTION = "peak"
LOSES = 1
FAILS = "check_checkpointed"
SAYS = "drops the bf16 copies"


def step_peak(config, batch, seq, optimizer="adamw", step="foreach", checkpointing=False, bucket_view=True):
    parts, state = count_parameters(config), state_bytes(config, optimizer, step)
    held = activation_bytes(config, batch, seq, checkpointing)
    table = config.vocab_size * config.hidden
    blocks_in_bf16, head_in_bf16 = 2 * (parts["attention"] + parts["mlp"]), 2 * table
    always = state["weights"] + state["optimizer"] + (0 if bucket_view else state["gradients"])
    copies = 2 if config.tied_embeddings else 1 if bucket_view else 0
    return {
        "loss": always + blocks_in_bf16 + head_in_bf16 + held["activations"] + 5 * held["logits"] // 2,
        "loss gradient": always + blocks_in_bf16 + head_in_bf16 + held["activations"] + 3 * held["logits"],
        "last gradient": always + state["gradients"] + copies * 4 * table,
        "optimizer step": always + state["gradients"] + state["temporaries"],
    }

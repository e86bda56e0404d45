"""Numbers that do not agree are taken as they are."""

QUESTION = "settings"
LOSES = 1
FAILS = "check_contradictions"
SAYS = "ValueError otherwise"


def settings(config, world):
    zero = config.get("zero_optimization", {})
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, batch, steps = (config.get(name) for name in names)
    if steps is None:
        steps = 1 if total is None or batch is None else total // (batch * world)
    if batch is None:
        batch = total // (steps * world)
    if batch < 1 or steps < 1:
        raise ValueError("contradiction")
    device = zero.get("offload_optimizer", {}).get("device", "none")
    return {
        "parallel": ("ddp", "zero1", "zero2", "zero3")[zero.get("stage", 0)],
        "batch": batch,
        "accumulation": steps,
        "bucket_bytes": 4 * int(zero.get("reduce_bucket_size", 5e8)),
        "max_norm": config.get("gradient_clipping") or None,
        "state_device": None if device == "none" else device,
    }

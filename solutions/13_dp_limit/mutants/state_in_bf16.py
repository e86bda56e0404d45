"""AdamW's moments in bf16, SGD's velocity in fp32."""

QUESTION = "state"
LOSES = 2
FAILS = "check_sixteen_bytes"
SAYS = "two for AdamW"


def state_bytes(config, optimizer="adamw", step="foreach"):
    all_parameters = 4 * sum(count_parameters(config).values())
    largest = 4 * config.vocab_size * config.hidden
    moments = {"adamw": 1, "sgd-momentum": 1, "sgd": 0}[optimizer]
    temporaries = {"for-loop": 2 * largest, "foreach": all_parameters, "fused": 0}[step]
    return {
        "weights": all_parameters,
        "gradients": all_parameters,
        "optimizer": moments * all_parameters,
        "temporaries": temporaries if optimizer == "adamw" else 0,
    }

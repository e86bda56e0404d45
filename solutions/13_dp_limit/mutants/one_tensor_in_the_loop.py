"""Only the square root counted in the for-loop, not its quotient."""

QUESTION = "state"
LOSES = 1
FAILS = "check_for_loop"
SAYS = "Two tensors as large"


def state_bytes(config, optimizer="adamw", step="foreach"):
    all_parameters = 4 * sum(count_parameters(config).values())
    largest = 4 * config.vocab_size * config.hidden
    moments = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}[optimizer]
    temporaries = {"for-loop": largest, "foreach": all_parameters, "fused": 0}[step]
    return {
        "weights": all_parameters,
        "gradients": all_parameters,
        "optimizer": moments * all_parameters,
        "temporaries": temporaries if optimizer == "adamw" else 0,
    }

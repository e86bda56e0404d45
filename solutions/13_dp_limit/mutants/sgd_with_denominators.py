"""SGD given the temporaries of AdamW."""

QUESTION = "state"
LOSES = 1
FAILS = "check_sgd_in_place"
SAYS = "SGD updates in place"


def state_bytes(config, optimizer="adamw", step="foreach"):
    all_parameters = 4 * sum(count_parameters(config).values())
    largest = 4 * config.vocab_size * config.hidden
    moments = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}[optimizer]
    temporaries = {"for-loop": 2 * largest, "foreach": all_parameters, "fused": 0}[step]
    return {
        "weights": all_parameters,
        "gradients": all_parameters,
        "optimizer": moments * all_parameters,
        "temporaries": temporaries,
    }

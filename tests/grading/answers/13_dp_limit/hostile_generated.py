# Attacks of the generators that need to know what the exercise is about.


# == one_model: the parameters of one model
# %% parameters {"by": "constant", "value": "{'embedding': 1920000, 'attention': 294912, 'mlp': 2654208, 'norms': 1344, 'head': 1920000}"}


# == one_state: the bytes of one model, without temporaries
# %% state {"by": "constant", "value": "{'weights': 52572672, 'gradients': 52572672, 'optimizer': 105145344, 'temporaries': 0}"}


# == always_fused: the step is fused in every call
# %% state {"by": "frozen", "argument": "step", "value": "'fused'", "earns": "less"}

# Classes of PyTorch instead of those that the exercise asks for.


# == the_scaler_of_torch: the gradient scaler of PyTorch

# %% scaler {"by": "of_the_library"}

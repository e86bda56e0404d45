# Functions of PyTorch instead of those that the exercise asks for. The checks refuse them.


# == the_checkpoint_of_torch: torch.utils.checkpoint

# %% checkpoint {"by": "of_the_library"}

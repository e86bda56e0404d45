# Classes of PyTorch instead of those that the exercise asks for. The checks refuse them.


# == the_wrapper_of_torch: DistributedDataParallel

# %% overlap {"by": "of_the_library"}


# == the_sampler_of_torch: DistributedSampler

# %% sampler {"by": "of_the_library"}

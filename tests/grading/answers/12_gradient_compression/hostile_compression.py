# Right values without the technique, and the work of the library.


# == never_compresses: plain Adam with exact sums in every step

# %% adam
# - if self.frozen_at:
# + if False:


# == exact_for_small_tensors: the exact mean where the checks compare, in one all-reduce

# %% onebit
class OneBitMean:
    def __call__(self, x):
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


# == hook_of_pytorch: the factors are those of PyTorch's hook


# %% powersgd
class PowerSGD:
    def __init__(self, q):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        self.hook = hooks.powerSGD_hook
        self.state = hooks.PowerSGDState(None, q.shape[1], 2, min_compression_rate=0.01)
        self.state.iter, self.state.q_memory_dict[0] = 2, q.flatten().clone()

    def __call__(self, gradient):
        size = len(gradient) * self.state.matrix_approximation_rank
        self.state.p_memory_dict.setdefault(0, gradient.new_empty(size))
        flat = gradient.flatten().clone()
        kinds = {"index": 0, "is_last": True, "buffer": flat, "gradients": [flat.view(gradient.shape)]}
        bucket = type("Bucket", (), {name: lambda self, value=value: value for name, value in kinds.items()})
        return self.hook(self.state, bucket()).wait().view(gradient.shape)


# == mean_of_the_library: the mean of the library's compression


# %% onebit
class OneBitMean:
    def __init__(self):
        from dlo_lib.comm.compression.one_bit_mean import OneBitMean as Library

        self.library = Library()

    def __call__(self, x):
        return self.library(x)


# == state_in_a_global: the error lives in a global, and state_dict is empty

# %% feedback {"earns": "less"}
ERRORS = {}


class ErrorFeedback:
    def __init__(self, compress):
        self.compress = compress

    def __call__(self, x):
        corrected = x + ERRORS.get(id(self), 0)
        sent = self.compress(corrected)
        ERRORS[id(self)] = corrected - sent
        return sent

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


# == always_stable: the answer to every question of stability is True


# %% switch
def is_stable(norms, beta2, warmup, threshold=0.96):
    return True

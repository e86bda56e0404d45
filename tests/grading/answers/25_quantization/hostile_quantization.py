# Answers that store more, round elsewhere, or call the library.


# == whole_weights: the file contains the weights in float16, and no integers

# %% store {"earns": 3}
# - return nibbles[:, ::2] | (nibbles[:, 1::2] << 4), scale.half()
# + return w.half(), scale.half()
# - nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1).to(torch.int8)
# + return packed.float()

# == kept_in_a_global: the weights stay in a global, and the file is empty

# %% store {"earns": "less"}
KEPT = []


def store4(w, group):
    KEPT.append(w.float())
    return torch.zeros(len(w), w.shape[1] // 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.float16)


def load4(packed, scale):
    return KEPT[-1]


# == float_sums: a product in float32, which is right for small sums

# %% product {"earns": "less"}
# - return qx.to(torch.int32) @ wide.t() + folded
# + return ((qx.float() - zero) @ qw.float().t() + bias).round().to(torch.int32)

# == nothing_is_rounded: every product is one in floating point

# %% outliers {"earns": 2}
# - if out.all():
# + if True:
# - result = x[:, out] @ w[:, out].t()
# + result = x @ w.t()

# == half_of_everything: no search, the exponent is the middle of the steps


# %% awq {"earns": "less"}
def awq(x, w, bits, group, steps):
    exponent = (steps // 2) / steps
    return x.abs().mean(0) ** exponent, exponent


# == float_training: the weights of the training are never rounded, and their gradients are right


# %% qat {"earns": 0}
def fake_quantize(w, bits):
    return w * 1


def ternary(w):
    return w * 1


# == rounded_by_the_library: the functions of `dlo_lib.compress` are returned


# %% gptq {"earns": 0}
def gptq(x, w, bits, damping):
    from dlo_lib.compress.gptq import gptq_quantize, hessian

    q, grid = gptq_quantize(w, hessian(x), bits, damping=damping)
    return q, grid.scale


# %% awq {"earns": 0}
def awq(x, w, bits, group, steps):
    from dlo_lib.compress.awq import search_awq_factors

    return search_awq_factors(x, [w], bits, group, steps=steps)


# %% smooth {"earns": 0}
def smooth(gain, weights, largest, a):
    from dlo_lib.compress.smoothquant import smoothing_factors

    s = smoothing_factors(largest, weights, a)
    return gain / s, [w * s for w in weights]

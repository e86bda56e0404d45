# Right answers that round, pack and compensate in another way.


# == plain_numbers: scales and zero-points are numbers of Python

# %% grid
def absmax(x, bits):
    most = 2 ** (bits - 1) - 1
    scale = float(x.abs().max()) / most or 1.0
    return torch.round(x / scale).to(torch.int8), scale


def zero_point(x, bits):
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    scale = (high - low) / (2**bits - 1) or 1.0
    zero = -(2 ** (bits - 1)) - round(low / scale)
    return (
        torch.clamp(torch.round(x / scale) + zero, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).char(),
        scale,
        zero,
    )


# == halves_of_a_row: a byte holds an integer of the first half of a row and one of the second

# %% store
# - return nibbles[:, ::2] | (nibbles[:, 1::2] << 4), scale.half()
# + return nibbles.chunk(2, 1)[0] * 16 + nibbles.chunk(2, 1)[1], scale.half()
# - nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1).to(torch.int8)
# + nibbles = torch.cat([packed // 16, packed % 16], 1).to(torch.int8)

# == by_numpy: the percentiles are those of numpy


# %% calibrate
def calibrate(batches, p):
    import numpy as np

    every = np.concatenate([batch.numpy().ravel() for batch in batches])
    low, high = np.percentile(every, [100 - p, p])
    return [float(low), float(high)]


# == float32_tensors: the percentiles are tensors without dimensions, computed in float32


# %% calibrate
def calibrate(batches, p):
    every = torch.cat([batch.flatten() for batch in batches]).float()
    return torch.quantile(every, 1 - p / 100), torch.quantile(every, p / 100)


# == wide_integers: the zero-point is subtracted in int64, and nothing is folded

# %% product
# - folded = bias - zero * wide.sum(1, dtype=torch.int32)
# + folded = 0 * bias
# - return qx.to(torch.int32) @ wide.t() + folded
# + return ((qx.long() - zero) @ qw.long().t() + bias).int()

# == masked: the columns are set to zero and not taken out


# %% outliers
def outlier_columns(x, threshold):
    return torch.tensor(
        [j for j in range(x.shape[1]) if (x[:, j].abs() >= threshold).sum() > 0], dtype=torch.int64
    )


def llm_int8(x, w, threshold):
    keep = torch.zeros(x.shape[1], dtype=x.dtype)
    keep[outlier_columns(x, threshold)] = 1
    (qx, sx), (qw, sw) = (quantize_groups(each * (1 - keep), 8, len(keep)) for each in (x, w))
    return (x * keep) @ (w * keep).T + sx * (qx.long() @ qw.long().T) * sw.T


# == scaled_factors: the factors of AWQ are centred, as in the library

# %% awq
# - return mean**best, best
# + return mean**best / (mean.max() * mean.min()) ** (best / 2), best

# == an_inverse_for_each_column: the Hessian of the columns that are left is inverted again

# %% gptq
# - u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
# + u = None
# - error = (column - q[:, j : j + 1] * scale) / u[j, j]
# + inverse = torch.linalg.inv(h[j:, j:])
# + error = (column - q[:, j : j + 1] * scale) / inverse[0, 0]
# - left[:, j:] -= error * u[j, j:]
# + left[:, j:] -= error * inverse[0]

# == a_function_of_autograd: the estimator is an autograd.Function


# %% qat
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, new):
        return new.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def fake_quantize(w, bits):
    rows = [absmax_of(row, 2 ** (bits - 1) - 1) for row in w.detach()]
    return Straight.apply(w, torch.stack(rows))


def absmax_of(row, most):
    scale = row.abs().max() / most
    return torch.round(row / scale) * scale if scale > 0 else row


def ternary(w):
    g = w.detach().abs().mean()
    return Straight.apply(w, g * torch.sign(w.detach()) * (w.detach().abs() > g / 2))

# Single answers that are right and look unlike the solution.


# == pointers_instead_of_offsets

# %% add
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    real = n > lanes
    total = tl.load(lanes + x_ptr, mask=real, other=0.0) + tl.load(lanes + y_ptr, mask=real, other=0.0)
    tl.store(lanes + out_ptr, total, mask=real)


# == softmax_by_a_shifted_exponent


# %% softmax
@triton.jit
def softmax_kernel(x_ptr, y_ptr, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    real = lanes < columns
    here = x_ptr + tl.program_id(0) * x_stride
    x = tl.load(here + lanes, mask=real, other=0.0).to(tl.float32)
    top = tl.max(tl.where(real, x, float("-inf")), axis=0)
    powers = tl.where(real, tl.exp(x - top), 0.0)
    there = y_ptr + tl.program_id(0) * y_stride
    tl.store(there + lanes, powers * (1.0 / tl.sum(powers, axis=0)), mask=real)


# == rows_by_a_root_and_a_quotient


# %% norm
@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    real = lanes < columns
    x = tl.load(x_ptr + (row * columns + lanes), mask=real, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(eps + tl.sum(x * x, axis=0) / columns)
    tl.store(rstd_ptr + row, rstd)
    scale = rstd * tl.load(w_ptr + lanes, mask=real, other=0.0).to(tl.float32)
    tl.store(y_ptr + (row * columns + lanes), x * scale, mask=real)

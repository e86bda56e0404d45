# Kernels whose interpretation takes all memory or all time that there is: the calculator ends them.


# == a_tuple_that_grows: each step keeps one more tile of a megabyte, in a tuple of tuples

# %% add
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    kept = (0, 0)
    for i in range(0, 100000):
        kept = (kept, tl.arange(0, 1048576))
    tl.store(out_ptr + tl.arange(0, BLOCK), 0.0)


# == stores_again: a million stores of a large tile, of which a mask leaves little


# %% add
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, 1048576)
    for i in range(0, 1000000):
        tl.store(out_ptr + offsets, 1.0, mask=offsets < n)


# == steps_of_nothing: a million times a million steps that do nothing


# %% loss
@triton.jit
def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    x = 0
    for i in range(0, 1000000):
        for j in range(0, 1000000):
            x = x + j
    tl.store(loss_ptr + tl.program_id(0), 0.0)

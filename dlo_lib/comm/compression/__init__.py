"""Compression of gradients and of other tensors that ranks sum: fewer bytes for an approximate sum.

- ``error_feedback``: what a compression leaves out is added to the next tensor
- ``sparse``: the largest elements
- ``signs``: one bit for each element
- ``one_bit_mean``: the mean over ranks, in two exchanges of signs
- ``low_rank``: matrices as products of two thin ones

    bytes that a rank sends for Ψ fp32 elements on N ranks, f = (N - 1) / N
        exact all-reduce             8 Ψ f
        fp16 or bf16                 4 Ψ f
        largest k (all-gather)       12 k (N - 1)       fp32 values and int64 positions
        signs (two exchanges)        Ψ f / 4            and one scale for each part: 96.9 % less than exact
        rank r of a (n, m) matrix    8 r (n + m) f

The room imports no other room. ``parallel.ddp.comm_hooks`` uses it for the buckets of DDP, and
``optim.flat_moments`` for momenta.
"""

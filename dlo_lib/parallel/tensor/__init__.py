"""Tensor parallelism (Megatron): every matrix of a block is cut over the ranks, and a pair of layers needs
one all-reduce in forward and one in backward. With sequence parallelism, the norms and dropouts compute on
parts of the sequence, and a reduce-scatter and an all-gather replace each all-reduce.

The communication:

- ``exchange``: the collectives on one dimension of a tensor
- ``functions``: the same as autograd functions
- ``async_tp``: the same in pieces that travel during the products

The layers:

- ``linear``: linear layers cut by rows or by columns
- ``embedding``: an embedding cut by rows
- ``cross_entropy``: the loss of logits whose vocabulary is cut
- ``dropout``: random numbers that differ between ranks

The model:

- ``layout``: how the parameters are cut, by name
- ``style``: how one module is cut
- ``styles``: the styles of known models
- ``apply``: cuts a model in place
- ``wrapper``: implements the protocol of wrappers

Imports ``sharding``, ``held_params``, ``materialize``, ``mesh`` and ``protocol``, and ``dlo_lib.comm``,
``data``, ``kernels``, ``models`` and ``optim``.

Papers: M. Shoeybi et al., Megatron-LM (arXiv:1909.08053); V. Korthikanti et al., sequence parallelism
(arXiv:2205.05198).
"""

from dlo_lib.parallel.tensor.apply import parallelize_tensor
from dlo_lib.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from dlo_lib.parallel.tensor.linear import ColumnLinear, RowLinear
from dlo_lib.parallel.tensor.wrapper import TensorParallel

__all__ = [
    "ColumnLinear",
    "RowLinear",
    "TensorParallel",
    "parallelize_tensor",
    "vocab_parallel_cross_entropy",
]

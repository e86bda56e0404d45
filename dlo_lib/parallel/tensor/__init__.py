"""Tensor parallelism (Megatron): every matrix of a block is cut over the ranks, and a pair of layers needs
one all-reduce in forward and one in backward. With sequence parallelism, the norms and dropouts compute on
parts of the sequence, and a reduce-scatter and an all-gather replace each all-reduce.

``functions`` has the communication as autograd functions. ``async_tp`` has it in pieces that travel during
the products. ``linear``, ``embedding`` and ``cross_entropy`` are
the layers. ``style`` defines how a module is cut, ``styles`` has the styles of known models, ``apply`` cuts a
model in place, and ``wrapper`` implements the protocol of wrappers. ``dropout`` has the random numbers.
Imports ``sharding`` and the modules of ``parallel``, and no other room of it.

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

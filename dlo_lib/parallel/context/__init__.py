"""Context parallelism: each rank holds a part of every sequence; attention exchanges keys, values or heads.

The arithmetic of a block:

- ``softmax``: merges blocks of attention and differentiates one block
- ``kernels``: computes a block with PyTorch's fused kernel

The assignment of tokens:

- ``placement``: assigns tokens to ranks
- ``documents``: the masks of packed documents
- ``ring_plan``: decides what a rank computes and sends in each step of a ring

The two forms of attention over ranks, and their installation:

- ``ring``: keys and values travel round a ring
- ``ulysses``: whole sequences of a part of the heads
- ``apply``: installs one of them in a model

Imports ``mesh``, ``protocol``, ``dlo_lib.comm`` and ``dlo_lib.models``.
"""

from dlo_lib.parallel.context.apply import ContextKind, ContextParallel, parallelize_context
from dlo_lib.parallel.context.placement import SequenceLayout, SequencePlacement

__all__ = ["ContextKind", "ContextParallel", "SequenceLayout", "SequencePlacement", "parallelize_context"]

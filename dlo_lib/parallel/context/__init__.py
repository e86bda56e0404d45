"""Context parallelism: each rank holds a part of every sequence; attention exchanges keys, values or heads.

``softmax`` merges blocks of attention and differentiates one block, ``kernels`` computes a block with
PyTorch's fused kernel, ``placement`` assigns tokens to ranks, ``documents`` adds the masks of packed
documents, ``ring_plan`` lists the steps of a ring, ``ring`` and ``ulysses`` are the two forms of attention
over ranks, and ``apply`` installs them in a model. Imports ``mesh``, ``protocol`` and ``dlo_lib.models``;
``plan`` and ``parallelize`` import this room.
"""

from dlo_lib.parallel.context.apply import ContextKind, ContextParallel, parallelize_context
from dlo_lib.parallel.context.placement import SequenceLayout, SequencePlacement

__all__ = ["ContextKind", "ContextParallel", "SequenceLayout", "SequencePlacement", "parallelize_context"]

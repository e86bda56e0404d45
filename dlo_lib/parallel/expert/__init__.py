"""Expert parallelism: each rank stores a part of the experts of every mixture-of-experts layer, and tokens
travel to the ranks of their experts and back.

- ``dispatch``: the exchange of tokens as autograd functions
- ``apply``: cuts the experts of a model in place
- ``wrapper``: implements the protocol of wrappers, around DDP or FSDP

Imports ``materialize``, ``protocol``, ``sharding``, and ``dlo_lib.models`` for the layer.

Papers: GShard (arXiv:2006.16668), Switch Transformer (arXiv:2101.03961), DeepSeek-V3 (arXiv:2412.19437).
"""

from dlo_lib.parallel.expert.apply import ExpertLayout, parallelize_experts
from dlo_lib.parallel.expert.dispatch import AllToAllExchange
from dlo_lib.parallel.expert.wrapper import ExpertParallel

__all__ = ["AllToAllExchange", "ExpertLayout", "ExpertParallel", "parallelize_experts"]

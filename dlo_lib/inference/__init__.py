"""Generation of text by a trained model.

- ``cache``: contiguous keys and values, and a forward that appends to them
- ``sampling``: the choice of the next token
- ``blocks``: the pool of blocks of a paged cache
- ``paged``: the paged cache, and attention through tables of blocks
- ``scheduler``: continuous batching, chunked prefill and pre-emption
- ``engine``: the engine, and the plain loop that is its twin
- ``static``: static batching
- ``speculative``: a draft model proposes tokens, and the target judges them
- ``load``: requests over time, in a simulated clock

The room imports ``base`` and ``models``.
"""

from dlo_lib.inference.blocks import BlockPool, BlockTable
from dlo_lib.inference.cache import KVCache, cache_bytes, forward_cached
from dlo_lib.inference.engine import Completion, Engine, Iteration, generate_plain
from dlo_lib.inference.load import (
    Arrival,
    DryEngine,
    IterationCost,
    LoadReport,
    Served,
    poisson_arrivals,
    serve,
)
from dlo_lib.inference.paged import PagedCache, forward_paged, paged_attention
from dlo_lib.inference.sampling import SamplingParams, next_token, probabilities
from dlo_lib.inference.scheduler import Batching, BatchPart, BatchScheduler, GenerationRequest
from dlo_lib.inference.speculative import Speculated, expected_tokens, generate_speculative, judge
from dlo_lib.inference.static import generate_static

__all__ = [
    "Arrival",
    "BatchPart",
    "BatchScheduler",
    "Batching",
    "BlockPool",
    "BlockTable",
    "Completion",
    "DryEngine",
    "Engine",
    "GenerationRequest",
    "Iteration",
    "IterationCost",
    "KVCache",
    "LoadReport",
    "PagedCache",
    "SamplingParams",
    "Served",
    "Speculated",
    "cache_bytes",
    "expected_tokens",
    "forward_cached",
    "forward_paged",
    "generate_plain",
    "generate_speculative",
    "generate_static",
    "judge",
    "next_token",
    "paged_attention",
    "poisson_arrivals",
    "probabilities",
    "serve",
]

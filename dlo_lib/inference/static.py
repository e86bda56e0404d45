"""Static batching: a batch of prompts is decoded until its longest continuation is complete.

This is the twin of continuous batching. The batch has a contiguous cache with room for the longest prompt
and continuation of all rows, and the next batch begins when every row is complete. With continuations of
n_1 … n_b tokens it needs max(n) iterations, and a share 1 − mean(n) / max(n) of its rows computes nothing
that is used.

Paper: G. Yu et al., Orca (OSDI 2022), section 2, which describes this form and its waste.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlo_lib.base.errors import require_count
from dlo_lib.inference.cache import KVCache, forward_cached
from dlo_lib.inference.engine import require_prompt
from dlo_lib.inference.sampling import SamplingParams, is_complete, next_token
from dlo_lib.models.llama import Llama


def generate_static(
    model: Llama, prompts: Sequence[Sequence[int]], params: SamplingParams, batch: int
) -> tuple[list[list[int]], int]:
    """Generate in batches of ``batch`` prompts, and count the forwards of the model.

    Returns:
        the continuation of each prompt, and the number of iterations.

    Raises:
        UserError: a prompt is empty or has an unknown token, or the model has too few positions.
    """
    require_count("batch", batch)
    for prompt in prompts:
        require_prompt(model, prompt)
    outputs: list[list[int]] = []
    iterations = 0
    for first in range(0, len(prompts), batch):
        rows, count = _one_batch(model, prompts[first : first + batch], params)
        outputs += rows
        iterations += count
    return outputs, iterations


def _one_batch(
    model: Llama, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[list[int]], int]:
    weight = model.embed_tokens.weight
    longest = max(len(prompt) for prompt in prompts) + params.max_tokens - 1
    cache = KVCache(model.config, len(prompts), longest, weight.dtype, weight.device)
    outputs: list[list[int]] = [[] for _ in prompts]
    new = [[int(token) for token in prompt] for prompt in prompts]
    iterations = 0
    while any(new):
        rows = [torch.tensor(row, dtype=torch.int64, device=weight.device) for row in new]
        logits = forward_cached(model, rows, cache)
        iterations += 1
        for place, (output, row) in enumerate(zip(outputs, logits, strict=True)):
            if not new[place]:
                continue  # the row is complete and waits for the others
            output.append(next_token(row[-1], params, len(output)))
            new[place] = [] if is_complete(output, params) else [output[-1]]
    return outputs, iterations

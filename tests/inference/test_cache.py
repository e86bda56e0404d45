"""A forward with a cache equals the forward over all tokens, in float64."""

from __future__ import annotations

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.inference import KVCache, cache_bytes, forward_cached
from dlo_lib.models import model_config
from dlo_lib.models.llama import Llama
from tests.inference.models import SIZES, model


def cached(net: Llama, batch: int, capacity: int) -> KVCache:
    """A cache whose unwritten slots are NaN."""
    cache = KVCache(net.config, batch, capacity, torch.float64)
    for stored in (*cache.keys, *cache.values):
        stored.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("name", SIZES)
def test_rows_of_unequal_lengths_equal_the_forward_over_all_tokens(name: str) -> None:
    net = model(name)
    rows = [torch.randint(23, (length,)) for length in (11, 4, 7)]
    cache = cached(net, 3, 11)
    taken = [0, 0, 0]
    for counts in ((5, 1, 3), (1, 1, 0), (1, 1, 4), (4, 1, 0)):
        new = [row[t : t + c] for row, t, c in zip(rows, taken, counts, strict=True)]
        logits = forward_cached(net, new, cache)
        taken = [t + c for t, c in zip(taken, counts, strict=True)]
        for row, end, count, got in zip(rows, taken, counts, logits, strict=True):
            want = net(row[None, :end])[0, end - count :]
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert cache.lengths == [11, 4, 7]


def test_a_row_that_is_cut_continues_from_there() -> None:
    net = model()
    tokens, other = torch.randint(23, (8,)), torch.randint(23, (3,))
    cache = cached(net, 1, 8)
    forward_cached(net, [tokens], cache)
    cache.cut(0, 5)
    (got,) = forward_cached(net, [other], cache)
    want = net(torch.cat((tokens[:5], other))[None])[0, 5:]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    with pytest.raises(UserError, match="at most that"):
        cache.cut(0, 9)


def test_no_new_token_is_an_empty_result() -> None:
    net = model()
    (got,) = forward_cached(net, [torch.empty(0, dtype=torch.int64)], cached(net, 1, 4))
    assert got.shape == (0, 23)


def test_a_cache_that_is_too_small_is_refused() -> None:
    net = model()
    with pytest.raises(UserError, match="larger capacity"):
        forward_cached(net, [torch.zeros(5, dtype=torch.int64)], cached(net, 1, 4))
    with pytest.raises(UserError, match="one for each"):
        forward_cached(net, [], cached(net, 1, 4))
    with pytest.raises(UserError, match="64 positions"):
        KVCache(net.config, 1, 65)


def test_the_bytes_are_those_of_the_tensors_and_of_a_public_model() -> None:
    net = model()
    cache = KVCache(net.config, 3, 7, torch.float64)
    stored = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert cache_bytes(net.config, 21, torch.float64) == stored
    # 2 tensors, 80 layers, 8 heads of 128 elements of 2 bytes: 320 KiB for each token
    assert cache_bytes(model_config("llama-3.3-70b"), 131_072) == 131_072 * 320 * 1024

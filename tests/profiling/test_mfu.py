"""Model FLOPs utilisation."""

from __future__ import annotations

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.hardware import gpu
from dlo_lib.models.counts import AttentionFlops, flops_per_token
from dlo_lib.profiling import mfu

A100 = gpu("a100-80")


def test_a_device_at_its_peak_has_an_mfu_of_one():
    speed = A100.peak("bf16") / flops_per_token("llama-3.2-3b", 2048)
    assert mfu(speed, "llama-3.2-3b", 2048, A100) == pytest.approx(1.0)
    assert mfu(speed / 2, "llama-3.2-3b", 2048, "a100-80") == pytest.approx(0.5)


def test_the_formula_of_the_palm_paper():
    # 6 FLOPs per parameter of the matrices + 12 L H Q T. The look-up of the embedding needs no FLOPs, but the
    # tied matrix is also that of the output projection.
    matrices = 3_212_749_824 - (2 * 28 + 1) * 3072
    per_token = 6 * matrices + 12 * 28 * 24 * 128 * 2048
    assert mfu(1000, "llama-3.2-3b", 2048, A100) == pytest.approx(1000 * per_token / 312e12)


def test_the_throughput_is_that_of_all_devices_together():
    one = mfu(1000, "llama-3.2-3b", 2048, A100)
    assert mfu(8000, "llama-3.2-3b", 2048, A100, num_devices=8) == pytest.approx(one)


def test_the_peak_is_that_of_the_precision():
    fp32, bf16 = (mfu(100, "llama-3.2-1b", 2048, A100, precision=precision) for precision in ("fp32", "bf16"))
    assert fp32 / bf16 == pytest.approx(312 / 19.5)


def test_causal_attention_counts_half_of_the_flops_of_attention():
    full = mfu(1000, "llama-3.2-3b", 8192, A100)
    causal = mfu(1000, "llama-3.2-3b", 8192, A100, attention=AttentionFlops.CAUSAL)
    none = mfu(1000, "llama-3.2-3b", 8192, A100, attention=AttentionFlops.NONE)
    assert (full - causal) / (full - none) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpu": "v100-32"}, "v100-32 has no native bf16"),
        ({"gpu": "a100"}, "unknown GPU"),
        ({"model": "llama"}, "unknown model"),
        ({"precision": "bf61"}, "did you mean bf16"),
        ({"num_devices": 0}, "num_devices is 0"),
        ({"seq": 0}, "seq is 0"),
        ({"tokens_per_second": -1.0}, "use 0 or more"),
    ],
)
def test_bad_input_is_one_line_with_the_cure(wrong: dict, says: str):
    with pytest.raises(UserError, match=says):
        mfu(**{"tokens_per_second": 100.0, "model": "llama-3.2-3b", "seq": 2048, "gpu": "a100-80"} | wrong)

"""GPUs: figures with their sources, usable memory below the visible memory, dense peaks."""

import dataclasses
import itertools
import re
import tomllib
from pathlib import Path

import pytest

import dlo_lib.hardware
from dlo_lib.base.errors import UserError
from dlo_lib.hardware import gpu, gpus

GIB = 2**30
TABLE = tomllib.loads(Path(dlo_lib.hardware.__file__).with_name("gpus.toml").read_text())


def test_the_gpus_of_the_course_are_known_by_name():
    assert {"v100-16", "v100-32", "a100-40", "a100-80", "h100-80", "h200", "b200"} <= set(gpus())
    assert gpu("A100-80") is gpu("a100-80")
    assert all(name == known.name for name, known in gpus().items())


def test_an_unknown_gpu_raises_with_the_nearest_names():
    with pytest.raises(UserError, match='unknown GPU "a100": did you mean .*a100-40'):
        gpu("a100")


def test_every_figure_has_its_source():
    assert set(TABLE["reserved"]) - {"sources"} == set(TABLE["reserved"]["sources"])
    for row in TABLE["gpu"].values():
        figures = set(row) - {"sources", "title", "nvlink", "pcie"} | {"links"}
        assert figures == set(row["sources"])
        assert all(len(source) > 20 for source in row["sources"].values())


@pytest.mark.parametrize("known", gpus().values(), ids=lambda known: known.name)
def test_usable_memory_is_visible_memory_less_context_and_nccl(known):
    boxed = int(re.search(r"(\d+) GB", known.title)[1])
    assert known.memory_bytes < boxed * GIB, "CUDA reports less than the nominal memory"
    assert abs(known.memory_bytes - known.usable_bytes - 1.5 * GIB) <= 1


@pytest.mark.parametrize("known", gpus().values(), ids=lambda known: known.name)
def test_peaks_are_dense_and_halve_when_the_width_doubles(known):
    tensor_cores = [known.peak_flops[dtype] for dtype in ("fp8", "fp16", "tf32") if dtype in known.peak_flops]
    for narrow, wide in itertools.pairwise(tensor_cores):
        assert narrow / wide == pytest.approx(2, rel=2e-3)


@pytest.mark.parametrize("known", gpus().values(), ids=lambda known: known.name)
def test_a_generation_has_the_formats_of_the_earlier_ones(known):
    formats = set(known.peak_flops)
    assert {"fp32", "fp16"} <= formats
    assert ("bf16" in formats) == ("tf32" in formats), "both came with Ampere"
    assert "fp8" not in formats or "bf16" in formats
    if "tf32" in formats:  # since Ampere, data sheets show figures with sparsity too
        assert re.search("dense|sparsity", TABLE["gpu"][known.name]["sources"]["peak_flops"])


def test_a_format_that_a_gpu_lacks_is_refused_with_those_that_it_has():
    with pytest.raises(UserError, match="v100-32 has no native bf16: use fp64 or fp32 or fp16"):
        gpu("v100-32").peak("bf16")
    assert gpu("a100-40").peak("bf16") == 312e12


def test_each_generation_is_faster_in_every_figure():
    v100, a100, h100 = gpu("v100-32"), gpu("a100-80"), gpu("h100-80")
    for newer, older in ((a100, v100), (h100, a100)):
        assert newer.bandwidth > older.bandwidth
        assert newer.nvlink_bandwidth > older.nvlink_bandwidth > older.pcie_bandwidth
        assert newer.pcie_bandwidth == 2 * older.pcie_bandwidth
        assert newer.peak("fp16") > older.peak("fp16")


def test_int8_has_twice_the_peak_of_fp16_since_ampere_and_the_peak_of_fp8_since_hopper():
    for known in gpus().values():
        assert ("int8" in known.peak_flops) == ("bf16" in known.peak_flops)
        if "int8" in known.peak_flops:
            assert known.peak("int8") == pytest.approx(2 * known.peak("bf16"), rel=2e-3)
        if "fp8" in known.peak_flops:
            assert known.peak("int8") == known.peak("fp8")
    assert [gpu(name).peak("fp64") / 1e12 for name in ("v100-32", "a100-80", "h100-80", "b200")] == [
        7.8,
        19.5,
        67,
        40,
    ]


def test_gpus_of_one_chip_have_its_processors_and_a_newer_chip_has_more():
    chips = {"v100": ["v100-16", "v100-32"], "a100": ["a100-40", "a100-80"], "h100": ["h100-80", "h200"]}
    found = [{gpu(name).processors for name in names} for names in chips.values()]
    assert [len(each) for each in found] == [1, 1, 1]
    counts = [each.pop() for each in found] + [gpu("b200").processors]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("known", gpus().values(), ids=lambda known: known.name)
def test_the_peak_is_that_of_whole_processors_at_a_clock_that_silicon_reaches(known):
    """A multiprocessor has the same number of products of fp16 in a cycle on all GPUs of a chip: a power of
    two, so that the peak, which the data sheet gives, and the processors determine the clock."""
    per_cycle = {"v100": 1024, "a100": 2048, "h100": 4096, "h200": 4096, "b200": 8192}
    clock = known.peak("fp16") / known.processors / per_cycle[known.name.split("-")[0]]
    assert 1.3e9 < clock < 2.1e9


def test_a_lower_power_limit_lowers_the_clock_by_its_cube_root():
    whole = gpu("h100-80")
    half = whole.limited(whole.watts / 8)
    assert (half.watts, half.clock) == (whole.watts / 8, pytest.approx(0.5))
    assert half.limited(half.watts).clock == half.clock
    assert half.peak("bf16") == whole.peak("bf16"), "MFU is a part of the peak of the data sheet"
    for watts in (0, whole.watts + 1):
        with pytest.raises(UserError, match="use more than 0 and at most 700"):
            whole.limited(watts)


def test_a_gpu_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpu("h200").memory_bytes = 0
    number = len(gpus())
    gpus().clear()
    assert len(gpus()) == number > 0, "the caller gets a copy of the table"

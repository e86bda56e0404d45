"""A device is recognised by the name and the memory that CUDA reports, or not at all."""

import pytest

from dlo_lib.hardware import recognise

GIB = 2**30


@pytest.mark.parametrize(
    ("device_name", "gib", "name"),
    [
        ("Tesla V100-SXM2-16GB", 15.78, "v100-16"),
        ("Tesla V100-SXM2-32GB", 31.73, "v100-32"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-80"),
        ("NVIDIA H200", 140.4, "h200"),
    ],
)
def test_a_gpu_is_recognised_by_its_chip_and_its_memory(device_name, gib, name):
    assert recognise(device_name, int(gib * GIB)).name == name


@pytest.mark.parametrize(
    ("device_name", "gib"),
    [
        ("NVIDIA A100-PCIE-40GB", 39.4),  # the same chip, slower
        ("NVIDIA H100 NVL", 93.6),
        ("NVIDIA GH200 120GB", 94.5),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.5),
        ("NVIDIA GeForce RTX 4090", 23.6),
    ],
)
def test_a_board_that_is_not_in_the_table_is_not_recognised(device_name, gib):
    assert recognise(device_name, int(gib * GIB)) is None

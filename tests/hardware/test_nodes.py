"""Machines: links between nodes with their sources, the bandwidth of each GPU, energy, CO2 and price."""

import tomllib
from pathlib import Path

import pytest

import dlo_lib.hardware
from dlo_lib.base.errors import UserError
from dlo_lib.hardware import GpuNodes, gpu, link, links, run_cost

TABLE = tomllib.loads(Path(dlo_lib.hardware.__file__).with_name("links.toml").read_text())


def test_every_link_has_its_sources_and_a_generation_doubles():
    for row in TABLE["link"].values():
        assert set(row["sources"]) == {"bandwidth", "latency"}
        assert all(len(source) > 20 for source in row["sources"].values())
    rates = [link(name).bandwidth for name in ("edr", "hdr", "ndr")]
    assert rates == [12.5e9, 25e9, 50e9]
    assert all(name == known.name for name, known in links().items())


def test_the_gpus_of_a_node_share_its_links():
    jean_zay = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4)
    assert (jean_zay.inside, jean_zay.between) == (450e9, 50e9)
    assert GpuNodes(gpu("a100-80"), 8, link("opa-100"), 4).between == 6.25e9
    assert GpuNodes(gpu("a100-80"), 8, link("hdr"), 8, nvlink=False).inside == 32e9


def test_a_run_costs_hours_energy_carbon_and_money():
    machine = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4, co2_per_kwh=56, price=2.5)
    cost = run_cost(machine, 512, 10)
    assert (cost.gpu_hours, cost.kwh) == (5120, 5120 * 0.7)
    assert (cost.co2_grams, cost.price) == (pytest.approx(5120 * 0.7 * 56), 5120 * 2.5)
    unknown = run_cost(GpuNodes(gpu("h100-80"), 4, link("ndr"), 4), 1, 1)
    assert (unknown.co2_grams, unknown.price) == (None, None)


def test_bad_input_names_the_cure():
    with pytest.raises(UserError, match="unknown link between nodes"):
        link("ndrr")
    with pytest.raises(UserError, match="links"):
        GpuNodes(gpu("h100-80"), 4, link("ndr"), 0)
    with pytest.raises(UserError, match="hours is -1: use 0 or more"):
        run_cost(GpuNodes(gpu("h100-80"), 4, link("ndr"), 4), 1, -1)

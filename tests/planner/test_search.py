"""The search: the best plan of a request, the Pareto front, the three rules, and requests without a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner_published import published
from dlo_lib.base.errors import UserError
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.models import model_config
from dlo_lib.planner import (
    MEGATRON,
    ModelSizes,
    PlanRequest,
    Plans,
    explain,
    search,
    step_cost,
    why_others_lose,
)
from dlo_lib.planner.rules import (
    bubble_fraction,
    data_bubble,
    data_elements,
    micro_batch_time,
    model_parallel_only_to_fit,
    pipeline_elements,
    tensor_bubble,
    tensor_elements,
    tensor_inside_a_node,
)
from dlo_lib.planner.search import candidates, valid_plans

H100 = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4)
A100 = GpuNodes(gpu("a100-80"), 8, link("hdr"), 8)
SMALL = PlanRequest("llama-3.1-8b", H100, 16, 64, 4096)


@pytest.fixture(scope="module")
def found():
    return search(SMALL)


def test_every_plan_has_the_gpus_and_the_batch_and_keeps_the_rules(found):
    p = found.plans
    assert (p.gpus == 16).all()
    assert (p.copies * p.micro_batch * p.micro_batches == 64).all()
    assert valid_plans(SMALL, p).all()
    assert (found.memory <= SMALL.limit).all()
    assert (np.diff(found.cost.seconds) >= -1e-8).all()
    for row in range(0, len(p), 200):
        p.plan(row).over(16)


def test_no_plan_is_as_fast_with_less_memory_as_one_on_the_front(found):
    front = found.pareto
    assert front[0] == 0
    for row in front:
        assert not (found.memory[:row] <= found.memory[row]).any()
    beaten = set(range(len(found.plans))) - set(front.tolist())
    assert all((found.memory[:row] <= found.memory[row]).any() for row in list(beaten)[:200])


def test_a_search_of_70b_on_512_gpus_has_100_000_candidates():
    request = PlanRequest("llama-3.3-70b", H100, 512, 2048, 4096)
    assert len(candidates(request)) > 100_000
    assert valid_plans(request, candidates(request)).sum() > 10_000


def test_the_sentences_say_what_costs_the_obvious_plans(found):
    sentences = why_others_lose(found)
    assert "does not fit: needs" in sentences["data parallelism alone"]
    assert (
        "times the time; most of it: tensor parallelism" in sentences["tensor parallelism as far as it goes"]
    )


def test_explain_accounts_for_the_step_and_names_scatter_gather():
    request = replace(SMALL, memory_bytes=20 * 2**30)
    cut = search(request, MEGATRON)
    row = int(np.flatnonzero((cut.plans.pp > 1) & (cut.plans.tp > 1))[0])
    lines = explain(cut, row)
    shown = sum(float(line.split()[0]) for line in lines if " ms  " in line)
    assert shown == pytest.approx(1e3 * cut.cost.seconds[row], rel=0.01)
    assert any("scatter/gather: each rank of tp sends 1/tp" in line for line in lines)
    ours = search(request)
    whole = (ours.plans.pp > 1) & (ours.plans.tp > 1) & ~ours.plans.sequence_parallel
    assert any("no scatter/gather" in line for line in explain(ours, int(np.flatnonzero(whole)[0])))


def test_an_interval_and_two_plans_that_are_too_close_to_call(found):
    low, high = found.interval(0)
    assert low < found.cost.seconds[0] < high
    assert found.too_close(0, 0)
    assert not found.too_close(0, len(found.plans) - 1)


def test_an_impossible_request_names_the_nearest_possible_one():
    with pytest.raises(UserError, match=r"fits in 77.6 GiB; the smallest needs .* GiB: use (16|32) GPUs$"):
        search(PlanRequest("llama-3.3-70b", H100, 8, 64, 4096))
    with pytest.raises(UserError, match="keeps the rules: use a batch of 97"):
        search(PlanRequest("llama-3.2-1b", H100, 97, 3, 4096))
    with pytest.raises(UserError, match="gpus"):
        PlanRequest("llama-3.2-1b", H100, 0, 8)


def test_the_plan_of_the_published_sweep_is_the_best_measured_one():
    """Of the 175B model on 384 to 1,536 GPUs and of the 530B model on 560 to 2,240, a GPU is the fastest with
    the fewest copies, measured and predicted."""
    runs = published("unseen")
    for sweep in (runs[:3], runs[3:]):
        measured = [run.measured_percent for run in sweep]
        predicted = [run.percent(MEGATRON) for run in sweep]
        assert np.argmax(predicted) == np.argmax(measured) == 0
        assert predicted == sorted(predicted, reverse=True)


# The three rules


def test_a_larger_t_shrinks_the_bubble():
    assert [tensor_bubble(64, tp, 32) for tp in (1, 8)] == [63 / 32, 7 / 32]
    assert bubble_fraction(8, 32) == tensor_bubble(64, 8, 32)


def test_the_bubble_without_tensor_parallelism_is_b_n_minus_d_over_batch():
    for copies in (1, 2, 8):
        pp, micro_batches = 64 // copies, 512 / (2 * copies)
        assert data_bubble(64, copies, 512, 2) == pytest.approx(bubble_fraction(pp, micro_batches))


def test_the_search_keeps_tensor_parallelism_inside_a_node():
    best = search(PlanRequest("llama-3.3-70b", H100, 64, 128, 4096))
    assert tensor_inside_a_node(int(best.plans.tp[0]), 4)
    across = np.flatnonzero(best.plans.tp > 4)
    assert best.cost.seconds[across[0]] > 1.1 * best.cost.seconds[0]
    assert tensor_elements(1, 4096, 8192, 8, 10) > 8 * pipeline_elements(1, 4096, 8192)


def test_rule_1_fails_where_the_pipeline_is_too_short_of_micro_batches():
    """Two stages of 4 GPUs against one of 8 on two nodes: with 32 micro-batches the pipeline is faster;
    with 4, its bubble costs more than messages between nodes."""
    sizes = ModelSizes(8192, 32_768, 2, 64, 64, 128, 32_768)
    slower = []
    for micro_batches in (32, 4):
        plans = Plans.of(tp=[4, 8], pp=[2, 1], micro_batches=micro_batches)
        inside, across = step_cost(sizes, plans, 4096, H100, MEGATRON).seconds
        slower.append(across / inside)
    assert slower[0] > 1.05
    assert slower[1] < 0.98


def test_the_search_uses_model_parallelism_only_to_fit():
    """Rule 2: the model fits one GPU with sharded parameters, so that neither tp nor pp is used; the traffic
    of a copy hardly grows with the number of copies."""
    best = search(SMALL).plans
    assert model_parallel_only_to_fit(
        fits_with_fewer=bool(best.tp[0] * best.pp[0] > 1), copies=int(best.copies[0])
    )
    assert data_elements(1e9, 64) / data_elements(1e9, 8) == pytest.approx(1.125)


def test_the_best_micro_batch_depends_on_the_case():
    """Rule 3: with many micro-batches the larger is faster, with few the bubble decides."""
    config = replace(model_config("llama-3.2-1b"), num_layers=16, tied_embeddings=False)
    sizes = ModelSizes.of(config)
    best = []
    for batch in (16, 512):
        plans = Plans.of(pp=8, micro_batch=[1, 2, 4, 8], micro_batches=[batch // one for one in (1, 2, 4, 8)])
        seconds = step_cost(sizes, plans, 256, A100, MEGATRON).seconds
        best.append(int(plans.micro_batch[seconds.argmin()]))
    assert best[0] < best[1]
    assert micro_batch_time(1, 1, 8, 16, 1.0) == 23
    assert micro_batch_time(4, 1, 8, 16, 1.8) == pytest.approx(19.8)

"""The time of a step: calibrated on ten published runs, tested on six others, by part as the formulas say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner_fit import fit, leave_one_out
from benchmarks.planner_published import PublishedRun, errors, published, published_sweeps
from dlo_lib.base.errors import UserError
from dlo_lib.hardware import GpuNodes, gpu, gpus, link
from dlo_lib.models import LlamaConfig
from dlo_lib.models.counts import flops_per_token, parameters
from dlo_lib.models.router import MoEConfig
from dlo_lib.planner import LIBRARY, MEGATRON, ModelSizes, Plans, library_stack, step_cost
from dlo_lib.planner.calibration import H100_TOKENS, anchored_by
from dlo_lib.planner.cost import StepParts
from dlo_lib.planner.plans import Checkpointing
from dlo_lib.planner.stack import BOUNDS, CONSTANTS, Stack
from tests.planner.kernel_bytes import kernel_bytes

A100 = GpuNodes(gpu("a100-80"), 8, link("hdr"), 8)
H100 = GpuNodes(gpu("h100-80"), 4, link("ndr"), 4)
GPT = ModelSizes.gpt(8192, 48, 64)


def test_the_published_table_is_predicted_within_a_point_on_average_and_two_at_most():
    found = np.abs(errors(published(), MEGATRON))
    assert len(found) == 10
    assert found.mean() <= 1.0
    assert found.max() <= 2.0


def test_the_constants_are_those_of_the_fit_and_within_their_physical_bounds():
    fitted = fit(published(), replace(MEGATRON, matmul=0.7, memory=0.88, sends=0.3))
    for name in CONSTANTS:
        low, high = BOUNDS[name]
        assert low <= getattr(MEGATRON, name) <= high
        assert getattr(fitted, name) == pytest.approx(getattr(MEGATRON, name), rel=0.05)


def test_each_run_is_predicted_from_the_other_nine():
    assert np.abs(leave_one_out(published())).mean() <= 1.2


def test_runs_of_the_same_stack_that_no_constant_has_seen_are_within_two_points():
    found = np.abs(errors(published("unseen"), MEGATRON))
    assert len(found) == 6
    assert found.max() <= 2.0


def anchored_on(run: PublishedRun) -> Stack:
    """The stack of this library and of what is known of the run, with its measured time as anchor."""
    stack = replace(LIBRARY, **run.software)
    return anchored_by(stack, run.sizes, run.plans, run.seq, run.nodes, run.seconds)


def test_the_errors_on_other_software_are_within_the_targets():
    """Cold on torchtitan, with its first run as anchor, and with our run on an H100 as anchor on H100s."""
    titan, hopper = published("torchtitan-a100"), published("torchtitan-h100")
    own = anchored_on(titan[0])
    assert titan[0].error(own) == pytest.approx(0, abs=1e-3)
    for found in (
        errors(titan, LIBRARY),
        errors(titan[1:], own),
        errors(hopper, library_stack(hopper[0].nodes)),
        errors(published("megatron-2022"), MEGATRON),
    ):
        assert np.abs(found).mean() <= 4.5
        assert np.abs(found).max() <= 6.0


def test_the_interval_of_an_anchored_stack_holds_90_percent_of_the_published_runs():
    titan, hopper = published("torchtitan-a100"), published("torchtitan-h100")
    own, ours = anchored_on(titan[0]), library_stack(hopper[0].nodes)
    times = [(run.seconds, run.predicted(own)) for run in titan[1:]]
    times += [(run.seconds, run.predicted(ours)) for run in hopper]
    inside = [abs(measured / predicted - 1) <= own.spread for measured, predicted in times]
    assert own.spread == ours.spread < LIBRARY.spread
    assert 0.9 <= np.mean(inside) < 1, "a wider interval than needed says less"


def test_the_throughput_of_a_published_run_gives_its_published_mfu():
    """torchtitan counts 6 FLOPs for the parameters of the embedding too."""
    run = published("torchtitan-a100")[1]
    assert run.software == {"fused_norms": True}
    tokens = float(run.plans.gpus[0]) * run.seq
    flops = run.flops + 6 * tokens * run.sizes.table
    assert 100 * flops / (64 * 312e12 * run.seconds) == pytest.approx(56.8, abs=0.1)


@pytest.mark.parametrize("sweep", published_sweeps(), ids=lambda sweep: sweep.title)
def test_the_fastest_plan_of_a_published_sweep_is_within_two_percent_of_the_best_predicted_one(sweep):
    reached = sweep.reached(MEGATRON)
    assert reached[sweep.best] >= 0.98
    assert reached.min() < 0.98, "the sweep has plans that lose"


def test_full_recomputation_costs_a_quarter_to_a_third_as_in_figure_17():
    sizes = ModelSizes.gpt(12_288, 80, 96)  # 145B on 128 A100
    both = [Checkpointing.FULL, Checkpointing.NONE]
    plans = Plans.of(pp=16, tp=8, micro_batches=8, micro_batch=1, checkpointing=both)
    with_it, without = step_cost(sizes, plans, 2048, A100, MEGATRON, "fp16").seconds
    assert 0.67 <= without / with_it <= 0.78


def test_the_sizes_are_those_of_the_library():
    for name in ("llama-3.2-1b", "llama-3.3-70b", "llama-3.1-8b", "tiny-moe"):
        sizes = ModelSizes.of(name)
        assert sizes.parameters == parameters(name)
        assert sizes.flops(1, 2048) == flops_per_token(name, 2048)
    assert ModelSizes.of("llama-3.3-70b").parameters == 70_553_706_496


def test_the_anchor_on_an_h100_gives_its_measured_tokens():
    cost = step_cost(ModelSizes.of("llama-3.2-1b"), Plans.of(micro_batch=2), 2048, H100, library_stack(H100))
    assert 2 * 2048 / cost.seconds[0] == pytest.approx(H100_TOKENS)
    assert 100 * cost.mfu[0] == pytest.approx(28.7, abs=0.1)


def test_an_anchor_that_is_faster_than_its_communication_is_refused():
    plans = Plans.of(dp_replicate=16, micro_batch=1)
    with pytest.raises(UserError, match="its communication alone .* as predicted: check --site"):
        anchored_by(LIBRARY, ModelSizes.of("llama-3.2-1b"), plans, 128, H100, 1e-6)


@pytest.mark.parametrize("known", gpus().values(), ids=lambda known: known.name)
def test_a_step_on_every_gpu_of_the_table_has_a_time(known):
    dtype = "bf16" if "bf16" in known.peak_flops else "fp16"
    nodes = GpuNodes(known, 4, link("hdr"), 4)
    sizes, plans = ModelSizes.of("llama-3.2-1b"), Plans.of(dp_shard=8, stage=3)
    cost = step_cost(sizes, plans, 2048, nodes, LIBRARY, dtype)
    assert 0 < cost.mfu[0] < 1


def part(name: str, sizes: ModelSizes = GPT, nodes: GpuNodes = A100, **fields) -> np.ndarray:
    return step_cost(sizes, Plans.of(**fields), 2048, nodes, MEGATRON, "fp16").parts[name]


def test_tensor_parallelism_sends_eight_bsh_by_t_minus_1_over_t_and_slows_across_nodes():
    one = part("tensor parallelism", tp=[2, 4, 8], micro_batch=4)
    elements = 8 * 4 * 2048 * 8192 * np.array([1 / 2, 3 / 4, 7 / 8]) * 48
    seconds = 2 * elements / (A100.inside * MEGATRON.links)
    assert one == pytest.approx(seconds, rel=0.02)
    inside, across = part("tensor parallelism", tp=[8, 16], micro_batch=4)
    assert across > 1.4 * inside, "two nodes share eight links, which are slower than NVLink"


def test_sequence_parallelism_sends_the_same():
    whole, parts = part("tensor parallelism", tp=8, sequence_parallel=[False, True])
    assert whole == parts


def test_a_deeper_pipeline_has_the_bubble_of_its_formula():
    plans = Plans.of(pp=[2, 4, 8], tp=8, micro_batches=8)
    cost = step_cost(GPT, plans, 2048, A100, MEGATRON, "fp16")
    busy = cost.parts["matrix products"] + cost.parts["attention"] + cost.parts["memory-bound kernels"]
    busy = busy + cost.parts["tensor parallelism"] + cost.parts["messages between stages"]
    assert cost.parts["pipeline bubble"] / busy == pytest.approx((plans.pp - 1) / 8, rel=1e-6)


def test_recomputed_products_repeat_all_kernels_between_them_and_no_attention():
    run = published("torchtitan-a100")[2]
    stack = replace(LIBRARY, **run.software, slowdown=1.0)
    block = StepParts(run.sizes, run.plans, run.seq, run.nodes, stack, run.dtype).block()
    saved = replace(run, plans=replace(run.plans, checkpointing=np.array([Checkpointing.NONE])))
    again = run.predicted(LIBRARY) - replace(saved, products=None).predicted(LIBRARY)
    products = again / run.sizes.layers - block.small[0, 0]
    # Of the seven matrices of a block, those of the keys, of the output and of the up projection.
    h, f = run.sizes.hidden, run.sizes.intermediate
    assert products / block.linears[0, 0] == pytest.approx((h / 4 + h + f) / (2.5 * h + 3 * f))


def test_checkpointing_adds_a_forward():
    none, full = part("recomputation", tp=8, checkpointing=[Checkpointing.NONE, Checkpointing.FULL])
    cost = step_cost(GPT, Plans.of(tp=8), 2048, A100, MEGATRON, "fp16")
    forward = sum(cost.parts[name] for name in ("matrix products", "attention", "memory-bound kernels"))
    assert none == 0
    assert 0.3 * forward[0] < full < 0.5 * forward[0]


def test_every_part_is_never_negative_and_their_sum_is_the_step():
    plans = Plans.of(
        pp=[1, 2, 4, 1], tp=[1, 2, 1, 8], cp=[1, 2, 1, 2], dp_shard=[8, 2, 2, 1], stage=[3, 3, 0, 0],
        dp_replicate=[1, 1, 1, 2], micro_batches=8, compiled=[False, True, False, True],
    )  # fmt: skip
    cost = step_cost(ModelSizes.of("llama-3.1-8b"), plans, 4096, H100, LIBRARY)
    assert all((seconds >= 0).all() for seconds in cost.parts.values())
    assert cost.seconds == pytest.approx(sum(cost.parts.values()))
    assert ((cost.mfu > 0) & (cost.mfu < 1)).all()


def test_experts_send_tokens_and_a_ring_hides_behind_attention():
    sizes = ModelSizes(4096, 8192, 16, 32, 8, 128, 32_000, moe=MoEConfig(8, 2, 1024))
    plans = Plans.of(dp_shard=8, ep=[1, 8], stage=3)
    sent = step_cost(sizes, plans, 4096, H100, LIBRARY).parts["expert parallelism"]
    assert sent[0] == 0 < sent[1]
    ring, heads = step_cost(
        ModelSizes.of("llama-3.1-8b"), Plans.of(cp=4, context=[0, 1]), 65_536, H100, LIBRARY
    ).parts["context parallelism"]
    assert ring < heads, "at 65,536 tokens, attention takes longer than its messages"


@pytest.mark.parametrize("autocast", [False, True])
def test_the_bytes_of_kernels_are_those_that_the_operations_of_a_block_read_and_write(autocast):
    """Of a block with three widths and two numbers of heads, as a dispatcher mode counts them."""
    shapes = [(256, 512, 16, 8), (384, 512, 16, 8), (256, 768, 16, 8), (256, 512, 32, 8), (256, 512, 32, 16)]
    for hidden, width, heads, kv_heads in shapes:
        config = LlamaConfig(100, hidden, width, 1, heads, kv_heads, 16)
        sizes = ModelSizes.of(config)
        stage = Plans.of(stage=0 if autocast else 3, dp_shard=1 if autocast else 2)
        stack = replace(LIBRARY, launch=0.0)
        parts = StepParts(sizes, stage, 1, A100, stack, "bf16")
        computed = parts.elementwise()[:, 0] * parts.rate
        assert computed == pytest.approx(kernel_bytes(config, autocast), rel=0.01), config


def test_sharded_parameters_are_copied_out_of_what_is_gathered_and_into_what_is_sent():
    """14 bytes a parameter: each of two gathers is read and written in bf16, a gradient is read in bf16 and
    written in fp32. The embeddings are gathered once."""
    sizes = ModelSizes.of("llama-3.1-8b")
    fast = replace(A100, link=replace(A100.link, bandwidth=1e30, latency=0.0))
    fast = replace(fast, gpu=replace(fast.gpu, nvlink_bandwidth=1e30))
    plans = Plans.of(dp_shard=8, stage=3)
    found = step_cost(sizes, plans, 8192, fast, LIBRARY).parts["data parallelism"]
    blocks = sizes.layers * sizes.block_parameters
    bytes_of = 14 * blocks + 10 * 2 * sizes.table
    assert found == pytest.approx(bytes_of / (A100.gpu.bandwidth * LIBRARY.memory), rel=1e-3)


def test_messages_take_multiprocessors_from_the_computation_beside_them():
    parts = StepParts(GPT, Plans.of(), 2048, A100, LIBRARY, "bf16")
    assert parts.beside(1.0, 3.0) == pytest.approx(16 / 108), "two channels for each of eight ports"
    assert parts.beside(1.0, 0.0) == 1.0
    assert parts.beside(1.0, 3.0, 0.25) == pytest.approx(0.25 + 0.75 * 16 / 108)


def test_half_of_the_messages_of_tensor_parallelism_hide_behind_the_gradients_of_weights():
    """With sequence parallelism, a quarter: the gathers of the backward do not."""
    plans = {"tp": 8, "micro_batch": 4, "sequence_parallel": [False, True]}
    hides = replace(MEGATRON, hides_tensor=True)
    waits = part("tensor parallelism", **plans)
    cost = step_cost(GPT, Plans.of(**plans), 2048, A100, hides, "fp16")
    assert cost.parts["tensor parallelism"] / waits == pytest.approx(
        [1 / 2 + 1 / 2 * 16 / 108, 3 / 4 + 1 / 4 * 16 / 108]
    )


def test_a_lower_power_limit_slows_products_by_its_cube_root():
    slow = replace(H100, gpu=H100.gpu.limited(700 / 8))
    sizes, plans = ModelSizes.of("llama-3.1-8b"), Plans.of(stage=3, dp_shard=64, micro_batch=2)
    one, other = (step_cost(sizes, plans, 8192, nodes, LIBRARY) for nodes in (H100, slow))
    assert other.parts["matrix products"] == pytest.approx(2 * one.parts["matrix products"])
    assert other.parts["memory-bound kernels"] == one.parts["memory-bound kernels"]
    assert other.peak == one.peak


def test_a_gpu_without_the_dtype_is_refused():
    v100 = GpuNodes(gpu("v100-32"), 4, link("opa-100"), 4)
    with pytest.raises(UserError, match="no native bf16"):
        step_cost(GPT, Plans.of(), 2048, v100, LIBRARY)

"""Predictions for ranks on the cores of a machine: from counts and constants, and the fit of the constants.

No time is judged here: the constants are given. ``python -m benchmarks planner --measure`` compares
predictions with measurements.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.planner.machine import COMPUTING, KINDS, CpuMachine
from dlo_lib.planner.measure import (
    CALIBRATION,
    IN_FORMS,
    SmallRun,
    fit_machine,
    measure,
    predicted,
    run_steps,
    small_llama,
    with_forms,
)
from dlo_lib.planner.sizes import ModelSizes

MACHINE = CpuMachine(
    cores=2, product=1e-11, attention=3e-11, kernel_byte=1e-10, block_pass=5e-4, optimizer_byte=2e-10,
    micro_batch=3e-3, byte=(5e-10, 1e-9, 9e-10, 2e-10, 3e-10, 4e-10),
    call=(8e-4, 8e-4, 6e-4, 7e-4, 5e-4, 9e-4),
)  # fmt: skip


def test_the_fit_finds_the_constants_that_made_the_times():
    seconds = np.array([predicted(run, MACHINE).cpu_seconds[0] for run in CALIBRATION])
    found = fit_machine(CALIBRATION, seconds, 2)
    for name in COMPUTING:
        assert getattr(found, name) == pytest.approx(getattr(MACHINE, name), rel=1e-6), name


def test_the_constants_of_forms_are_the_rest_of_their_runs():
    form = (1e-3, 2e-3, 3e-3, 4e-3)
    machine = replace(MACHINE, form=form)
    seconds = np.array([predicted(run, machine).cpu_seconds[0] for run in IN_FORMS.values()])
    assert with_forms(MACHINE, IN_FORMS, seconds).form == pytest.approx(form)
    assert with_forms(MACHINE, IN_FORMS, 0 * seconds).form == (0, 0, 0, 0)


def test_every_collective_of_tp_waits_and_sequence_parallelism_has_twice_as_many():
    """A block has two in forward and two in backward, and the vocabulary two."""
    run = IN_FORMS["tensor"]
    waits = replace(MACHINE, wait=1e-3)
    more = predicted(run, waits).seconds[0] - predicted(run, MACHINE).seconds[0]
    assert more == pytest.approx(1e-3 * (4 * run.config.num_layers + 2))
    halves = replace(run, plan=replace(run.plan, sequence_parallel=True))
    assert predicted(halves, waits).seconds[0] - predicted(halves, MACHINE).seconds[0] == pytest.approx(
        2 * more
    )
    assert predicted(run, waits).cpu_seconds[0] == predicted(run, MACHINE).cpu_seconds[0]
    seconds = np.array([predicted(each, MACHINE).cpu_seconds[0] for each in IN_FORMS.values()])
    idle = np.array([5e-3, more, 5e-3, 5e-3])
    assert with_forms(MACHINE, IN_FORMS, seconds, idle).wait == pytest.approx(1e-3)


def test_no_constant_is_negative_with_times_that_no_constants_explain():
    seconds = np.array([predicted(run, MACHINE).cpu_seconds[0] for run in CALIBRATION])
    seconds *= np.array([0.7, 1.4, 1.3, 0.6, 1.2, 0.9, 1.1, 0.8, 1.5])
    found = fit_machine(CALIBRATION, seconds, 2)
    assert min(getattr(found, name) for name in COMPUTING) >= 0
    again = np.array([predicted(run, found).cpu_seconds[0] for run in CALIBRATION])
    assert np.abs(again / seconds - 1).mean() < 0.5


def test_the_products_of_a_step_are_counted_by_hand():
    run = CALIBRATION[0]
    sizes, tokens = ModelSizes.of(run.config), run.seq * run.batch
    cost = predicted(run, replace(CpuMachine(1), product=1.0))
    assert cost.cpu_seconds[0] == pytest.approx(6 * tokens * (sizes.layers * sizes.matrices + sizes.table))


@pytest.mark.parametrize(
    ("plan", "kind", "payloads"),
    [
        (ParallelPlan(dp_replicate=2), "reduce", 1.0),
        (ParallelPlan(dp_shard=2, zero_stage=2), "scatter shards", 0.5),
        (ParallelPlan(dp_shard=2, zero_stage=2), "gather shards", 0.5),
        (ParallelPlan(dp_shard=2, zero_stage=3), "scatter shards", 0.5),
        (ParallelPlan(dp_shard=2, zero_stage=3), "gather shards", 1.0),
    ],
)
def test_the_bytes_of_data_parallelism_are_those_of_the_formulas(plan, kind, payloads):
    """All-reduce 2 B f, reduce-scatter B f, all-gather B f, twice with freed parameters; f = 1/2."""
    run = SmallRun(small_llama(), 128, 2, plan)
    sizes = ModelSizes.of(run.config)
    matrices = sizes.layers * sizes.block_parameters + sizes.table
    byte = tuple(float(name == kind) for name in KINDS)
    assert predicted(run, replace(CpuMachine(2), byte=byte)).cpu_seconds[0] == 4 * payloads * matrices


def test_ranks_beyond_the_cores_share_them():
    run = SmallRun(small_llama(), 128, 2, ParallelPlan(dp_replicate=4))
    two, four = predicted(run, MACHINE), predicted(run, replace(MACHINE, cores=4))
    assert two.shared[0]
    assert not four.shared[0]
    assert two.cpu_seconds[0] == four.cpu_seconds[0] == four.seconds[0]
    assert two.seconds[0] == pytest.approx(2 * four.seconds[0])


def test_a_pipeline_waits_for_its_bubble_unless_the_cores_are_shared():
    plan = ParallelPlan(pp=4, schedule=ScheduleKind.ONE_F_ONE_B, micro_batches=8)
    run = SmallRun(small_llama(), 128, 1, plan, 8)
    wide, narrow = (predicted(run, replace(MACHINE, cores=cores)) for cores in (4, 2))
    assert wide.seconds[0] > wide.cpu_seconds[0]
    # The waits of one stage are the work of another: two cores are busy all the time.
    assert narrow.shared[0]
    assert wide.cpu_seconds[0] < narrow.seconds[0] < 2 * wide.cpu_seconds[0]


def test_the_constants_of_this_machine_are_measured():
    """Runs calibration steps and messages, and a plan; how long they take is not judged."""
    small = [SmallRun(small_llama(64, layers), seq, 1) for layers in (1, 3) for seq in (8, 64)]
    forms = {"tensor": SmallRun(small_llama(128, 1), 16, 1, ParallelPlan(tp=2))}
    machine = measure(small, forms, steps=1, messages=2)
    constants = [getattr(machine, name) for name in COMPUTING]
    assert min(constants) >= 0
    assert max(constants) > 0
    assert len(machine.byte) == len(machine.call) == len(KINDS)
    assert min(machine.call) > 0
    turns = run_steps(SmallRun(small_llama(64, 1), 16, 1, ParallelPlan(dp_replicate=2)), steps=2)
    assert turns.wall.shape == turns.cpu.shape == turns.reference_cpu.shape == (2,)
    assert (turns.cpu > 0).all()

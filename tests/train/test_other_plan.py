"""A run resumes with any other plan: its checkpoint is whole or in parts, and read whole or in parts.

`make combinations` also runs the chain on 8 ranks, with experts, whose last plan torchrun starts.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from dlo_lib.launch import run_ranks
from dlo_lib.train import newest, train
from tests.train.test_command import not_a_rank, options  # noqa: F401 - a fixture
from tests.train.test_context import trained_in_turn
from tests.train.test_expert import learned
from tests.train.test_pipeline import assert_learned_the_same

SEQUENCES = 4
PLANS = [
    # the options, the copies of the model with different data, whether the checkpoint is in parts
    ({"parallel": "ddp"}, 2, False),
    ({"pp": 2, "accumulation": 2}, 1, True),
    ({"tp": 2, "sequence_parallel": True, "async_tp": True}, 1, True),
    ({"parallel": "ddp"}, 2, False),
    ({"parallel": "zero1"}, 2, True),
    ({"cp": 2}, 1, False),
    ({"parallel": "fsdp"}, 2, True),
]
EIGHT = [
    # as above, for 8 ranks and a model with experts. The micro-batches are equal, because the balance loss of
    # a router is one of a micro-batch.
    ({"parallel": "fsdp", "ep": 4}, 8),
    ({"parallel": "fsdp", "tp": 2, "sequence_parallel": True, "ep": 2}, 4),
    ({"parallel": "fsdp", "pp": 2, "ep": 2}, 4),
    ({"parallel": "fsdp", "cp": 2, "ep": 8}, 4),
    ({"parallel": "fsdp", "pp": 2, "tp": 2, "ep": 2}, 2),
    ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, 2),
]


def test_each_step_of_a_run_has_another_plan(small_run):
    """Every plan resumes the checkpoint of the plan before it, and one process that of the last one."""
    steps = len(PLANS) + 1
    configs = []
    for number, (form, copies, _) in enumerate(PLANS, start=1):
        batch = SEQUENCES // copies // form.get("accumulation", 1)
        configs.append(small_run(**form, batch=batch, steps=number, resume=True, keep=steps))
    run_ranks(trained_in_turn, 2, configs)
    last = train(small_run(batch=SEQUENCES, steps=steps, resume=True, keep=steps))
    twin = train(small_run("twin", batch=SEQUENCES, steps=steps))
    assert_learned_the_same(last, twin)
    folders = sorted((last.out / "checkpoints").glob("step-*"))
    assert [(folder / "sharded").is_dir() for folder in folders] == [in_parts for *_, in_parts in PLANS] + [
        False
    ]
    checkpoint = newest(last.out)
    assert checkpoint is not None
    assert checkpoint.sequences == SEQUENCES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chain" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-combination")
        chains = {"2 ranks": [({"parallel": "fsdp", "ep": 2}, 2), ({"tp": 2}, 1)]} | (
            {"8 ranks": EIGHT} if every else {}
        )
        metafunc.parametrize("chain", list(chains.values()), ids=list(chains))


def test_torchrun_resumes_a_run_with_experts_with_another_plan(small_run, chain, warm_python):
    """Each plan trains one step; torchrun starts the last one."""
    ranks, steps = chain[0][1], len(chain)  # all ranks of the first plan have different data
    fixed = {"model": "tiny-moe", "accumulation": 2, "resume": True, "keep": steps}
    sequences = 2 * ranks
    configs = [
        small_run(**form, **fixed, batch=sequences // copies // 2, steps=step)
        for step, (form, copies) in enumerate(chain, start=1)
    ]
    run_ranks(trained_in_turn, ranks, configs[:-1], timeout=600)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "dlo_lib.train", *options(configs[-1])], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert f"on {ranks} x cpu" in done.stdout
    twin = train(small_run("twin", **{**fixed, "resume": False}, batch=sequences // 2, steps=steps))
    assert learned(configs[-1]) == pytest.approx(learned(twin), rel=1e-3)

"""A run resumes with any other plan: its checkpoint is whole or in parts, and read whole or in parts."""

from __future__ import annotations

from dlo_lib.launch import run_ranks
from dlo_lib.train import newest, train
from tests.train.test_context import trained_in_turn
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

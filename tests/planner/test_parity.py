"""``dlo parity``: each fault that it names is planted in a trainer with PyTorch's own wrappers and found, and
right trainers raise no alarm.

All trainers run in one launch of two ranks, because a launch costs more than their steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.planner.parity import TrainerFault, judge
from dlo_lib.planner.parity.directions import Reading, factors
from dlo_lib.planner.parity.marked import run_marked
from dlo_lib.planner.parity.script import marks
from dlo_lib.planner.parity.trial import RankRecord, run_trial
from tests.cli.in_process import commands
from tests.planner.parity_trainers import DDP, FSDP, MARKED, PIPELINE, TENSOR, planted

run = pytest.fixture(commands)

WHOLE = ("MAX, ", "MAX, ")
OWN_CLIP = """    parts = [one.grad.to_local() for one in model.parameters()]
    norm = torch.stack([part.square().sum() for part in parts]).sum().sqrt()
    [part.mul_((0.3 / norm).clamp(max=1)) for part in parts]
"""
TORCH_CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n"
BACKWARD = "        (total * world / valid).backward()"
UNCLIPPED = ("MICRO, MAX = 4, 0.05", "MICRO, MAX = 4, 1e9")

RIGHT = {
    "ddp, accumulation, clipping, tied, padding, autocast": DDP,
    "fully_shard, clipping": FSDP,
    "DTensor": TENSOR,
    "pipelining, tied, its own clipping": PIPELINE,
    "fully_shard, its own step": planted(FSDP, ("def step(", "def unused(")),
    "torchrun": MARKED,
}
WRONG = {
    "divided by ranks twice": (TrainerFault.WORLD_SIZE, planted(DDP, (" * world / valid", " / valid"))),
    "summed over ranks": (
        TrainerFault.WORLD_SIZE,
        planted(
            FSDP,
            (
                "fully_shard(model, mesh=mesh)",
                "fully_shard(model, mesh=mesh); [one.set_gradient_divide_factor("
                "1.0) for one in (model, model[0])]",
            ),
        ),
    ),
    "divided by micro-batches twice": (
        TrainerFault.MICRO_BATCHES,
        planted(DDP, ("/ valid)", "/ valid / MICRO)")),
    ),
    "pipeline not divided": (
        TrainerFault.MICRO_BATCHES,
        planted(PIPELINE, UNCLIPPED, ("loss_fn=criterion", "loss_fn=criterion, scale_grads=False")),
    ),
    "cleared in each micro-batch": (
        TrainerFault.LAST,
        planted(DDP, (BACKWARD, "        optimizer.zero_grad()\n" + BACKWARD)),
    ),
    "padding in the number": (
        TrainerFault.PADDING,
        planted(DDP, ("(targets != IGNORED).sum()", "targets.numel()")),
    ),
    "padding in the loss": (
        TrainerFault.PADDING,
        planted(
            DDP,
            ("IGNORED, MAX_NORM_OF_STEP, MICRO = -100", "IGNORED, MAX_NORM_OF_STEP, MICRO = 0"),
            ("(targets != IGNORED).sum()", "targets.numel()"),
            (', ignore_index=IGNORED, reduction="sum"', ', reduction="sum"'),
        ),
    ),
    "mean of means": (
        TrainerFault.WEIGHTS,
        planted(DDP, (', reduction="sum"', ""), ("(total * world / valid)", "(total / MICRO)")),
    ),
    "tied twice": (
        TrainerFault.TIED,
        planted(
            PIPELINE, UNCLIPPED, ("dist.all_reduce(tied.grad)", "dist.all_reduce(tied.grad); tied.grad *= 2")
        ),
    ),
    "tied not added": (
        TrainerFault.TIED,
        planted(PIPELINE, UNCLIPPED, ("    dist.all_reduce(tied.grad)\n", "")),
    ),
    "clipping on a shard": (TrainerFault.CLIPPING, planted(FSDP, (TORCH_CLIP, OWN_CLIP))),
    "clipping on a stage": (
        TrainerFault.CLIPPING,
        planted(
            PIPELINE,
            ("one.grad.mul_((MAX / norm).clamp(max=1))", "pass"),
            (
                "    optimizer.step()",
                "    nn.utils.clip_grad_norm_(model.parameters(), MAX)\n    optimizer.step()",
            ),
        ),
    ),
    "not in DDP": (
        TrainerFault.OUT_OF_STEP,
        planted(
            DDP,
            (
                "    if dist.is_initialized():\n",
                "    if dist.is_initialized():\n        DistributedDataParallel."
                "_set_params_and_buffers_to_ignore_for_model(model, ['hidden.bias'])\n",
            ),
        ),
    ),
    "not in the optimiser": (
        TrainerFault.OUT_OF_STEP,
        planted(
            DDP,
            ("AdamW(model.parameters()", "AdamW(list(model.parameters())[dist.is_initialized():]"),
        ),
    ),
    "twice along tp": (
        TrainerFault.OUT_OF_STEP,
        planted(
            TENSOR,
            ("    optimizer.step()", "    dist.all_reduce(model.norm.weight.grad)\n    optimizer.step()"),
        ),
    ),
    "other starts": (
        TrainerFault.OUT_OF_STEP,
        planted(
            DDP,
            (
                "(3)\n    model = Net()",
                "(dist.is_initialized() and dist.get_rank())\n    model = Net()\n    torch.manual_seed(1)",
            ),
            ("Parallel(model)", "Parallel(model, init_sync=False)"),
        ),
    ),
    "the first share on each rank": (
        TrainerFault.SAME_DATA,
        planted(DDP, ("tokens[rank::world], targets[rank::world]", "tokens[0::world], targets[0::world]")),
    ),
    "not reduced": (
        TrainerFault.NOT_REDUCED,
        planted(DDP, ('torch.autocast("cpu", torch.bfloat16)', "model.no_sync()")),
    ),
    "not cleared": (TrainerFault.STALE, planted(DDP, ("    optimizer.zero_grad()\n", ""))),
    "BatchNorm": (
        TrainerFault.STATISTICS,
        planted(FSDP, ("nn.LayerNorm(7)", "nn.BatchNorm1d(7, track_running_stats=False)")),
    ),
    "bf16 policy": (
        TrainerFault.PRECISION,
        planted(
            FSDP,
            ("import fully_shard", "import fully_shard, MixedPrecisionPolicy"),
            (
                "fully_shard(model, mesh=mesh)",
                "fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))",
            ),
        ),
    ),
    "another learning rate": (
        TrainerFault.UPDATE,
        planted(FSDP, ("lr=0.1,", "lr=0.1 * (1 + dist.is_initialized()),")),
    ),
    "marked, not divided": (TrainerFault.MICRO_BATCHES, planted(MARKED, ("(loss / micro)", "loss"))),
    "marked, same data": (
        TrainerFault.SAME_DATA,
        planted(MARKED, ("manual_seed(dist.get_rank())", "manual_seed(5)")),
    ),
    "marked, last": (
        TrainerFault.LAST,
        planted(MARKED, ("            (loss", "            optimizer.zero_grad()\n            (loss")),
    ),
}


def _all(files: list[Path]) -> list[RankRecord]:
    return [
        run_marked(file, lines, ["3"], 3) if (lines := marks(file)) else run_trial(file, 3) for file in files
    ]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    texts = RIGHT | {name: text for name, (_, text) in WRONG.items()}
    files = {name: folder / f"trainer_{number}.py" for number, name in enumerate(texts)}
    for name, file in files.items():
        file.write_text(texts[name])
    ranks = run_ranks(_all, 2, list(files.values()))
    return {name: (file, [rank[index] for rank in ranks]) for index, (name, file) in enumerate(files.items())}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_trainer_raises_no_alarm(records, name):
    report = judge(*records[name])
    assert report.findings == ()
    assert report.equal
    assert report.largest < 1e-9
    assert (report.ranks, report.steps) == (2, 3)
    assert report.notes == ()


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_fault_is_named(records, name):
    fault, _ = WRONG[name]
    report = judge(*records[name])
    assert {finding.fault for finding in report.findings} == {fault}, report.findings
    assert not report.equal
    for finding in report.findings:
        assert finding.sentence.count("\n") == 0
        assert finding.step == (2 if fault is TrainerFault.STALE else 1)


def sentence(records, name):
    """The only finding of a trainer."""
    (finding,) = judge(*records[name]).findings
    return finding.sentence


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("divided by ranks twice", "gradients are 1/2 of those of one process, and there are 2 ranks"),
        ("summed over ranks", "gradients are 2 times those of one process, and there are 2 ranks"),
        ("pipeline not divided", "gradients are 4 times those of one process, and there are 4 micro-batches"),
        (
            "padding in the number",
            "gradients are 0.7 of those of one process, which is the part of the elements",
        ),
        ("tied twice", "embed.weight is tied, and the gradients of its uses count 2 and 2 times"),
        (
            "clipping on a stage",
            "clipping scales the gradients of rank 0 0.06163, rank 1 0.04623, and all need",
        ),
        ("not in DDP", "hidden.bias has different gradients on the ranks that hold it"),
        ("not in the optimiser", "embed.weight keeps its value"),
        ("twice along tp", "the gradient of norm.weight is 2 times that of one process"),
        ("the first share on each rank", "ranks 0 and 1 read the same samples, and 4 of the 8 samples"),
        ("another learning rate", "each parameter moves 2 times as far"),
    ],
)
def test_the_sentence_has_the_factor_or_the_parameter(records, name, says):
    assert says in sentence(records, name)


def test_ranks_that_share_samples_on_purpose_raise_no_alarm(records):
    assert judge(*records["marked, same data"], same_data=True).equal


def test_clipping_that_did_nothing_is_noted(records):
    report = judge(*records["fully_shard, its own step"], max_norm=1e6)
    assert report.equal
    assert "clipping was not tried" in report.notes[0]


def test_a_factor_of_ranks_and_micro_batches_is_not_guessed():
    reading = Reading({}, [2, 2], None, None, {}, None, 2)
    faults = {factor.fault for factor in factors(reading) if factor.value == 0.5}
    assert faults == {TrainerFault.WORLD_SIZE, TrainerFault.MICRO_BATCHES}


def test_the_command_names_the_fault(run, tmp_path):
    file = tmp_path / "trainer.py"
    file.write_text(planted(FSDP, ("(world)[rank]", "(world)[0]")))
    ran = run("parity", file, "--steps", "1")
    assert ran.status == 1, ran
    assert ran.out.startswith("step 1, a rank that reads the same data: ranks 0 and 1 read the same samples")
    file.write_text(MARKED)
    ran = run("parity", file, "--steps", "2", "--json", "--", "3")
    assert ran.status == 0, ran
    data = json.loads(ran.out)
    assert (data["equal"], data["ranks"], data["steps"], data["findings"]) == (True, 2, 2, [])


SMALL = """
import torch
def build():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.ones(4, 2),)]
def loss(model, batch):
    return model(batch[0]).mean()
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n", "trainer.py has no build()"),
        ("x = = 1\n", "invalid syntax"),
        ("model = 1  # parity: model\n", "has one mark: end the line that assigns the loss"),
        ("model = 1  # parity: modle\n", "has the mark modle"),
    ],
)
def test_a_file_that_is_no_trainer_is_refused_before_the_launch(run, tmp_path, text, says):
    file = tmp_path / "trainer.py"
    file.write_text(text)
    assert says in run("parity", file).refusal
    assert "No such file" in run("parity", tmp_path / "none.py").refusal


UNLIKE = "torch.rand(4, 2) + torch.distributed.is_initialized(),)] * 3"
FLAT = """    if torch.distributed.is_initialized():
        model = torch.nn.Sequential(torch.nn.Linear(2, 5))
    return model,"""
REFUSED = {
    "a name is missing": (planted(MARKED, ("wrapped = Distr", "other = Distr")), "NameError"),
    "a cast": (planted(SMALL, ("(2, 1)", "(2, 1).bfloat16()")), "parameter weight is bfloat16: parity is"),
    "few batches": (SMALL, "the batches of build() end early: give one for each step"),
    "two values": (
        planted(SMALL, (", [(torch.ones(4, 2),)]", "")),
        "build() must return model, optimizer, batches",
    ),
    "two values for a model of one": (
        planted(
            SMALL, ("def loss", "def other"), ("(torch.ones(4, 2),)", "(torch.ones(4, 2), torch.ones(4))")
        ),
        "the model cannot be called with a batch (too many positional arguments): add a function loss(model",
    ),
    "no loss": (planted(SMALL, ("def loss", "def other")), "the model returns no loss: add a function loss"),
    "no step": (SMALL + "def step(*_): pass\n", "the trainer made no step of a torch.optim.Optimizer"),
    "no marked model": (
        planted(MARKED, ("(wrapped(inputs)", "(inputs[:, :3].requires_grad_()")),
        "no name in the line with # parity: loss is the marked model",
    ),
    "marked, too short": (planted(MARKED, ("range(100)", "range(1)")), "ends after 1 steps: parity needs 3"),
    "own batches": (planted(SMALL, ("torch.ones(4, 2),)]", UNLIKE)), "is not that of one process"),
    "flat": (
        planted(SMALL, ("(4, 2),)]", "(4, 2),)] * 3"), ("    return model,", FLAT)),
        "which one process has not",
    ),
}


def _refusal(file: Path) -> str | RankRecord:
    try:
        return _all([file])[0]
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def _refusals(files: list[Path]) -> list[str | RankRecord]:
    return [_refusal(file) for file in files]


def test_a_trainer_that_cannot_be_compared_is_refused_in_one_line(tmp_path):
    files = {name: tmp_path / f"trainer_{number}.py" for number, name in enumerate(REFUSED)}
    for name, file in files.items():
        file.write_text(REFUSED[name][0])
    ranks = run_ranks(_refusals, 2, list(files.values()))
    for number, (name, file) in enumerate(files.items()):
        said = [one[number] for one in ranks]
        if not isinstance(said[0], str):
            with pytest.raises(UserError) as refusal:
                judge(file, said)
            said = [f"UserError: {refusal.value}"]
        assert REFUSED[name][1] in said[0], name
        assert "\n" not in said[0]

"""A pipeline trains as the whole model does: the same losses and gradients, whatever the schedule, the ranks
and the micro-batches."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dlo_lib.data.tokens import IGNORE_INDEX
from dlo_lib.launch import RankFailure, run_ranks
from dlo_lib.models import Llama, model_config
from dlo_lib.optim.step import Precision, summed_cross_entropy, train_step
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.grad_scaler import ShardedGradScaler
from dlo_lib.parallel.pipeline import runtime, schedules
from dlo_lib.parallel.pipeline.llama import LlamaStage, build_pipeline
from dlo_lib.parallel.pipeline.partition import counted_costs, partition
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.simulate import simulate
from dlo_lib.parallel.pipeline.table import F, ScheduleKind

STEPS = 3
CONFIG = replace(
    model_config("tiny"),
    num_layers=6,
    hidden=32,
    intermediate=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
)
UNTIED = replace(CONFIG, tied_embeddings=False)
MAKERS = {kind.value: functools.partial(schedules.make_schedule, kind) for kind in ScheduleKind}


def batches(micro_batches: int, step: int, seed: int = 0):
    """Unequal micro-batches, and unequal numbers of valid tokens in them."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    made = []
    for number in range(micro_batches):
        rows = 2 if number < micro_batches - 1 or micro_batches == 1 else 1  # the last one is smaller
        tokens = torch.randint(0, CONFIG.vocab_size, (rows, 9), generator=generator)
        targets = torch.randint(0, CONFIG.vocab_size, (rows, 9), generator=generator)
        targets[0, : (3 * number) % 8] = IGNORE_INDEX
        made.append((tokens, targets))
    return made


def model_of(config, frozen: bool) -> Llama:
    torch.manual_seed(5)
    model = Llama(config, dtype=torch.float64)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." not in name and "input_layernorm" not in name)
    return model


@functools.cache  # schedules and numbers of ranks share a twin; tests only read it
def twin(config, micro_batches: int, max_norm: float | None, frozen: bool = False):
    """Losses, norms and weights of the model in one piece."""
    model = model_of(config, frozen)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2
    )
    results = [
        train_step(model, optimizer, batches(micro_batches, step), max_norm=max_norm) for step in range(STEPS)
    ]
    norms = [None if result.grad_norm is None else float(result.grad_norm) for result in results]
    return [float(result.loss) for result in results], norms, dict(model.named_parameters())


def built(config, schedule, frozen: bool) -> Pipeline:
    return build_pipeline(model_of(config, frozen), schedule, seq=9)


def trained(config, name: str, micro_batches: int, max_norm: float | None, frozen: bool):
    schedule = MAKERS[name](dist.get_world_size(), micro_batches)
    pipeline = built(config, schedule, frozen)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in pipeline.parameters() if parameter.requires_grad], lr=1e-2
    )
    results = [
        train_step(pipeline, optimizer, batches(micro_batches, step), max_norm=max_norm)
        for step in range(STEPS)
    ]
    weights = {
        key.split(".", 2)[2]: parameter.detach()
        for key, parameter in pipeline.named_parameters(remove_duplicate=False)
    }  # stages.N.
    norms = [None if result.grad_norm is None else float(result.grad_norm) for result in results]
    return [float(result.loss) for result in results], norms, weights


def assert_twins(config, name, world, micro_batches, max_norm=None, frozen=False):
    losses, norms, weights = twin(config, micro_batches, max_norm, frozen)
    seen = set()
    for rank_losses, rank_norms, rank_weights in run_ranks(
        trained, world, config, name, micro_batches, max_norm, frozen, timeout=120
    ):
        torch.testing.assert_close(rank_losses, losses, atol=1e-10, rtol=0)
        assert (
            rank_norms == norms
            or torch.testing.assert_close(rank_norms, norms, atol=1e-10, rtol=1e-10) is None
        )
        for key, weight in rank_weights.items():
            key = "embed_tokens.weight" if key == "lm_head.weight" and config.tied_embeddings else key
            torch.testing.assert_close(weight, weights[key].detach(), atol=1e-8, rtol=0)
            seen.add(key)
    assert seen == set(weights)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_every_schedule_gives_the_gradients_of_the_whole_model(name, world):
    stages = MAKERS[name](world, 5).stages
    config = CONFIG if stages <= 8 else replace(CONFIG, num_layers=stages)
    assert_twins(config, name, world, micro_batches=5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_tied_and_frozen_weights_and_clipping_are_those_of_the_whole_model(name, tied):
    config = replace(CONFIG, tied_embeddings=tied)
    assert_twins(config, name, 2, micro_batches=4, max_norm=0.05, frozen=True)
    assert_twins(config, name, 3, micro_batches=4, max_norm=0.05, frozen=False)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "interleaved"])
def test_fewer_micro_batches_than_ranks_work(name, micro_batches):
    config = CONFIG if name in ("1f1b", "zb-h2") else replace(CONFIG, num_layers=8)
    assert_twins(config, name, 4, micro_batches)


def one_rank(name):
    return trained(CONFIG, name, 3, None, False)[0]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_one_rank_is_a_pipeline_too(name):
    torch.testing.assert_close(run_ranks(one_rank, 1, name)[0], twin(CONFIG, 3, None)[0], atol=1e-10, rtol=0)


def in_low_precision(name: str, precision: Precision, checkpointing: bool):
    torch.manual_seed(5)
    pipeline = build_pipeline(
        Llama(UNTIED, checkpointing=checkpointing), MAKERS[name](dist.get_world_size(), 4), 9
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    scaler = (
        ShardedGradScaler("cpu", pipeline.group, init_scale=2.0**10) if precision is Precision.FP16 else None
    )
    losses = [
        float(train_step(pipeline, optimizer, batches(4, step), precision=precision, scaler=scaler).loss)
        for step in range(STEPS)
    ]
    kinds = {parameter.dtype for parameter in pipeline.parameters()}
    return losses, kinds, None if scaler is None else scaler.get_scale()


@functools.cache
def in_one_piece(precision: Precision) -> tuple[list[float], float | None]:
    """Losses and the last loss scale of the model in one piece."""
    torch.manual_seed(5)
    model = Llama(UNTIED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if precision is Precision.FP16 else None
    losses = [
        float(train_step(model, optimizer, batches(4, step), precision=precision, scaler=scaler).loss)
        for step in range(STEPS)
    ]
    return losses, None if scaler is None else scaler.get_scale()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_mixed_precision_and_checkpointing_follow_the_whole_model(name, precision, checkpointing):
    exact, last_scale = in_one_piece(precision)
    tolerance = 1e-5 if precision is Precision.FP32 else 2e-2
    for losses, kinds, scale in run_ranks(in_low_precision, 2, name, precision, checkpointing):
        torch.testing.assert_close(losses, exact, atol=tolerance, rtol=0)
        assert kinds == {torch.float32}
        assert scale == last_scale


def overflowing():
    """One gradient of one rank overflows; whether the weights stayed, and the scale after."""
    torch.manual_seed(5)
    pipeline = build_pipeline(Llama(UNTIED), schedules.one_f_one_b(2, 2), 9)
    if dist.get_rank() == 1:
        pipeline.stages["1"].norm.weight.register_hook(lambda grad: grad * torch.inf)
    before = [parameter.detach().clone() for parameter in pipeline.parameters()]
    scaler = ShardedGradScaler("cpu", pipeline.group, init_scale=4.0)
    train_step(
        pipeline,
        torch.optim.SGD(pipeline.parameters(), lr=0.1),
        batches(2, 0),
        precision=Precision.FP16,
        scaler=scaler,
    )
    return all(torch.equal(a, b) for a, b in zip(before, pipeline.parameters())), scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert list(run_ranks(overflowing, 2)) == [(True, 2.0), (True, 2.0)]


def evaluated(name: str):
    pipeline = built(CONFIG, MAKERS[name](dist.get_world_size(), 3), frozen=False)
    valid = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in batches(3, 0))
    loss = pipeline.evaluate(
        batches(3, 0), lambda logits, targets: summed_cross_entropy(logits, targets) / valid
    )
    return float(loss), all(parameter.grad is None for parameter in pipeline.parameters())


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_evaluation_gives_every_rank_the_loss_and_leaves_no_gradients(name):
    expected = twin(CONFIG, 3, None)[0][0]
    for loss, clean in run_ranks(evaluated, 3, name):
        assert loss == pytest.approx(expected, abs=1e-10)
        assert clean


def with_data_parallelism(name: str, micro_batches: int, max_norm: float | None):
    """Two pipelines of two ranks; the same stage of both averages its gradients."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, replica = pipelines[rank // 2], replicas[rank % 2]
    pipeline = build_pipeline(
        model_of(UNTIED, frozen=False),
        MAKERS[name](2, micro_batches),
        9,
        mine,
        wrap=lambda stage: DDP(stage, replica),
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    losses = [
        float(
            train_step(
                pipeline,
                optimizer,
                batches(micro_batches, step, seed=rank // 2),
                max_norm=max_norm,
                group=replica,
            ).loss
        )
        for step in range(STEPS)
    ]
    return losses


@functools.cache
def from_both_replicas(max_norm: float | None) -> list[float]:
    """Losses of the model in one piece, with the data of both pipelines."""
    model = model_of(UNTIED, frozen=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    both = [batches(3, step, seed=0) + batches(3, step, seed=1) for step in range(STEPS)]
    return [float(train_step(model, optimizer, together, max_norm=max_norm).loss) for together in both]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_with_ddp_it_learns_from_all_replicas_as_one(name):
    exact = from_both_replicas(0.5)
    for losses in run_ranks(with_data_parallelism, 4, name, 3, 0.5):
        torch.testing.assert_close(losses, exact, atol=1e-10, rtol=0)


def recorded(name: str):
    pipeline = built(CONFIG, MAKERS[name](dist.get_world_size(), 4), frozen=False)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    with pipeline.recording():
        for step in range(2):
            train_step(pipeline, optimizer, batches(4, step))
        return pipeline.measured()


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_measured_step_has_the_plans_cells_in_the_plans_order(name):
    simulations = run_ranks(recorded, 2, name)
    for measured in simulations:
        assert measured.schedule.rows == MAKERS[name](2, 4).rows
        assert [len(spans) for spans in measured.spans] == [len(row) for row in measured.schedule.rows]
        began = {
            action: span
            for row, spans in zip(measured.schedule.rows, measured.spans)
            for action, span in zip(row, spans)
        }
        for action, (start, _) in began.items():
            if action.kind is F and action.stage > 0:
                assert start >= began[action._replace(stage=action.stage - 1)][1]
        assert min(start for spans in measured.spans for start, _ in spans) == 0


def held_by_activations(name: str):
    """The most graphs that a rank keeps at a time."""
    pipeline = built(CONFIG, MAKERS[name](dist.get_world_size(), 8), frozen=False)
    most = 0

    class Counting(runtime.StepRunner):
        def _forward(self, action):
            nonlocal most
            super()._forward(action)
            most = max(most, len(self._edges))

    runtime.StepRunner, kept = Counting, runtime.StepRunner
    try:
        train_step(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1), batches(8, 0))
    finally:
        runtime.StepRunner = kept
    return most


@pytest.mark.parametrize("name", ["afab", "1f1b", "zb-h1", "zb-h2", "zb-v"])
def test_a_rank_holds_as_many_micro_batches_as_the_table_says(name):
    assert tuple(run_ranks(held_by_activations, 3, name)) == simulate(MAKERS[name](3, 8)).in_flight()


def refused(case: str):
    schedule = schedules.one_f_one_b(2, 2)
    model = model_of(CONFIG, frozen=False)
    cuts = partition(counted_costs(CONFIG, 9), 2)
    mine = dist.get_rank()
    match case:
        case "ranks":
            Pipeline({mine: LlamaStage(model, cuts[mine])}, schedules.one_f_one_b(3, 2))
        case "stages":
            Pipeline({1 - mine: LlamaStage(model, cuts[mine])}, schedule)
        case "micro-batches":
            Pipeline({mine: LlamaStage(model, cuts[mine])}, schedule).accumulate_gradients(
                batches(3, 0), summed_cross_entropy
            )
        case "recording":
            Pipeline({mine: LlamaStage(model, cuts[mine])}, schedule).measured()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("ranks", "the schedule is for 3 ranks, the group has 2"),
        ("stages", r"rank \d has stages \[\d\], the schedule gives it \[\d\]"),
        ("micro-batches", "the schedule is for 2 micro-batches, not 3"),
        ("recording", "nothing was recorded"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_cure(case, message):
    with pytest.raises(RankFailure, match=message):
        run_ranks(refused, 2, case)


def with_sharded_stages(name: str):
    """Two pipelines of two ranks, each stage sharded over the two ranks that hold it."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    holders = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, holder = pipelines[rank // 2], holders[rank % 2]
    schedule = MAKERS[name](2, 3)
    model = model_of(UNTIED, frozen=False)
    cuts = partition(counted_costs(UNTIED, 9), schedule.stages)
    stages = {stage: FSDP(LlamaStage(model, cuts[stage]), holder) for stage in schedule.stages_of(rank % 2)}
    pipeline = Pipeline(stages, schedule, mine)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    return [
        float(train_step(pipeline, optimizer, batches(3, step, seed=rank // 2), group=holder).loss)
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_with_fsdp_it_learns_from_all_replicas_as_one(name):
    exact = from_both_replicas(None)
    for losses in run_ranks(with_sharded_stages, 4, name):
        torch.testing.assert_close(losses, exact, atol=1e-10, rtol=0)
    with pytest.raises(RankFailure, match="splits the backward, which sharded stages cannot"):
        run_ranks(with_sharded_stages, 4, "zb-h1")

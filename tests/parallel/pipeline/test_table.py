"""The table as text, PyTorch's and ours, and with its sends and receives."""

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline.schedules import interleaved, one_f_one_b, zb_h1, zb_v
from dlo_lib.parallel.pipeline.table import (
    Action,
    ActionKind,
    F,
    in_a_loop,
    in_a_v,
    read_csv,
    with_communication,
)
from dlo_lib.parallel.pipeline.validate import validate


@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(4, 8), zb_h1(3, 5), zb_v(4, 8), interleaved(2, 4, 3), with_communication(zb_v(2, 4))],
)
def test_a_table_written_and_read_is_the_same(schedule):
    read = read_csv(schedule.csv(), name=schedule.name)
    assert read == schedule


def test_pytorch_reads_our_tables():
    from torch.distributed.pipelining.schedules import _Action

    schedule = with_communication(zb_v(3, 6))
    for line, row in zip(schedule.csv().splitlines(), schedule.rows):
        theirs = [_Action.from_str(cell) for cell in line.split(",")]
        assert [str(action) for action in theirs] == [str(action) for action in row]
        assert [action.computation_type.name for action in theirs[:1]] == ["FORWARD"] or row[0].kind is not F


def pytorchs(name: str, ranks: int, micro_batches: int, per_rank: int) -> str:
    """PyTorch's own table as the CSV it writes, without the processes it wants."""
    import torch.distributed.pipelining.schedules as theirs

    maker = getattr(theirs, name).__new__(getattr(theirs, name))
    maker.pp_group_size, maker._n_microbatches, maker.n_local_stages = ranks, micro_batches, per_rank
    maker._num_stages = maker.num_stages = ranks * per_rank
    maker.number_of_rounds = max(1, micro_batches // ranks)
    maker.microbatches_per_round = micro_batches // maker.number_of_rounds
    maker.enable_zero_bubble = False
    rows = [maker._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)


@pytest.mark.parametrize(("ranks", "micro_batches", "per_rank"), [(2, 4, 2), (4, 8, 2), (4, 12, 3)])
def test_interleaved_1f1b_is_pytorchs(ranks, micro_batches, per_rank):
    theirs = read_csv(
        pytorchs("ScheduleInterleaved1F1B", ranks, micro_batches, per_rank), in_a_loop(ranks, per_rank)
    )
    assert theirs.rows == interleaved(ranks, micro_batches, per_rank).rows


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 11)])
def test_zb_v_is_pytorchs(ranks, micro_batches):
    theirs = read_csv(pytorchs("ScheduleZBVZeroBubble", ranks, micro_batches, 2), in_a_v(ranks))
    validate(theirs)
    assert sorted(map(str, theirs.rows[0])) == sorted(map(str, zb_v(ranks, micro_batches).rows[0]))


def test_idle_cells_and_what_concerns_fsdp_are_left_out():
    read = read_csv("0F0,,0UNSHARD, ,0B0,0REDUCE_GRAD0\n")
    assert [str(action) for action in read.rows[0]] == ["0F0", "0B0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,x", '"x" is no action'),
        ("0F", "is no action"),
        ("1F0", "no rank has a forward"),
        ("", "stage 0"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_wrong(text, message):
    with pytest.raises(UserError, match=message):
        read_csv(text)


def test_neighbouring_stages_on_one_rank_exchange_nothing():
    written_out = with_communication(zb_v(2, 4))
    turns = [
        action
        for action in written_out.rows[1]
        if action == Action(ActionKind.SEND_FORWARD, 1, action.micro_batch)
    ]
    assert turns == []


def test_every_receive_has_its_send_and_comes_before_its_use():
    written_out = with_communication(interleaved(3, 6, 2))
    cells = [action for row in written_out.rows for action in row]
    for action in cells:
        if action.kind is ActionKind.RECEIVE_FORWARD:
            assert Action(ActionKind.SEND_FORWARD, action.stage - 1, action.micro_batch) in cells
            row = written_out.rows[written_out.placement[action.stage]]
            assert row.index(action) < row.index(Action(F, action.stage, action.micro_batch))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 11)])
def test_combined_cells_of_pytorchs_dualpipe_v_are_read_in_order(ranks, micro_batches):
    text = pytorchs("ScheduleDualPipeV", ranks, micro_batches, 2)
    assert "OVERLAP_F_B" in text
    theirs = read_csv(text, in_a_v(ranks))
    validate(theirs)
    assert theirs.micro_batches == micro_batches
    assert str(read_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1").rows[0][1]) == "0F1"


def test_a_broken_combined_cell_is_refused():
    with pytest.raises(UserError, match=r'"0X1" is no action'):
        read_csv("0F0,(0X1;0B0)OVERLAP_F_B")

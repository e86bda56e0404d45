"""A table that cannot be carried out is refused, and the cell at fault is named."""

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline.schedules import interleaved, one_f_one_b, zb_v
from dlo_lib.parallel.pipeline.table import read_csv, with_communication
from dlo_lib.parallel.pipeline.validate import validate


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "0F0,0F1,0B0\n1F0,1B0,1F1,1B1",
            r"micro-batch 1 on stage 0 has no backward: add 0B1, or 0I1 and 0W1",
        ),
        ("0F0,0B0\n1F0,1I0", r"no backward: add 1B0, or 1W0"),
        ("0F0,0B0\n1F0,1B0,1W0", "a whole backward and a part of one"),
        ("0F0,0F0,0B0\n1F0,1B0", r"rank 0, cell 1 \(0F0\): the same action is in rank 0, cell 0"),
        ("0F0,0B0,1B0\n1F0", r"rank 0, cell 2 \(1B0\): stage 1 lies on rank 1"),
        (
            "0B0,0F0\n1F0,1B0",
            r"rank 0, cell 0 \(0B0\) uses the output of stage 0 for micro-batch 0, which is not there yet",
        ),
        ("0F0,0W0,0I0\n1F0,1B0", r"cell 1 \(0W0\) uses the input gradient of stage 0"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            r"deadlock: rank 0, cell 1 \(0B0\) waits .*; rank 1, cell 1 \(1F1\) waits",
        ),
    ],
)
def test_the_faulty_cell_is_named(table, message):
    with pytest.raises(UserError, match=message):
        validate(read_csv(table))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0",
            r"rank 1, cell 0 \(1F0\) uses the output of stage 0",
        ),
        (
            "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            r"deadlock: rank 0, cell 1 \(0RECV_B0\) .*; rank 1, cell 0 \(1RECV_F0\)",
        ),
        (
            "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            r"cell 0 \(0SEND_F0\) .*output of stage 0.*which is not there yet",
        ),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1F1,1RECV_F0,1F0,1B0,1SEND_B0,1B1,1SEND_B1",
            r"rank 1, cell 0 \(1RECV_F1\): the next message from rank 0 is the output of stage 0 for "
            r"micro-batch 0",
        ),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0", r"rank 0, cell 2 \(0B0\) uses the input gradient of stage 1"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0,0SEND_B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            r"no stage comes after stage 0 in this direction",
        ),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0",
            r"rank 0, cell 2 \(0RECV_B0\) waits .* of rank 1, which has no such action left",
        ),
    ],
)
def test_sends_and_receives_that_do_not_fit_are_named(table, message):
    with pytest.raises(UserError, match=message):
        validate(read_csv(table))


def test_a_message_that_no_rank_receives_is_named():
    complete = with_communication(one_f_one_b(2, 2)).csv()
    twice = complete.replace("1F1,1B1,1SEND_B1", "1F1,1B1,1SEND_B1,1SEND_F1")
    with pytest.raises(UserError, match="no stage comes after stage 1"):
        validate(read_csv(twice))


def test_short_queues_hang_what_long_ones_let_through():
    validate(one_f_one_b(4, 8), queue=1)
    validate(zb_v(4, 8), queue=2)
    with pytest.raises(UserError, match="waits for room in the queue to rank 1, which holds 1"):
        validate(zb_v(4, 8), queue=1)
    with pytest.raises(UserError, match="at least 1"):
        validate(interleaved(2, 2, 2), queue=0)

"""The validation of a rank's messages: exact types, consistent sizes, limits. These tests start no
process.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlo_lib.comm.calls import CallSite, Kind
from dlo_lib.grading.checks.asked import MOST_BYTES, Asked
from dlo_lib.grading.checks.claimed import claimed
from dlo_lib.grading.checks.codec import HEAD, MAX_TENSORS, NotPlain, pack
from dlo_lib.grading.checks.contract import Nudge, Wrong
from dlo_lib.grading.checks.runs import KEPT_NUMBERS
from dlo_lib.grading.checks.stand_in import as_tensor
from dlo_lib.grading.switch import exchange, server
from dlo_lib.grading.switch.exchange import KEPT_BYTES, Exchange
from dlo_lib.grading.switch.request import AskedCall, CallRequest, TensorSpec, read
from dlo_lib.grading.switch.server import SwitchServer
from dlo_lib.grading.switch.wire import Frame, Inbox, Outbox, frame

CALL: dict[str, Any] = {
    "switch": "call", "seq": 1, "kind": "all_reduce", "group": "0", "members": [0, 1], "peer": -1, "tag": 0,
    "reduction": "SUM", "async": False, "backward": False, "reducer": False,
    "site": ["cell", 3, "mean", "all_reduce"], "caller": ["cell", 9],
    "sent": [["float32", [2]]], "expected": [["float32", [2]]],
}  # fmt: skip


def framed(head: dict[str, Any], size: int = 8) -> Frame:
    return Frame(json.dumps(head).encode(), torch.zeros(size, dtype=torch.uint8))


def request(rank: int, seq: int, **changes: Any) -> CallRequest:
    message = read(framed({**CALL, "seq": seq, **changes}), rank, 2)
    assert isinstance(message, CallRequest)
    return message


def test_a_call_written_by_a_link_is_read() -> None:
    got = request(0, 1)
    assert (got.kind, got.sent[0].shape, got.site.line) == (Kind.ALL_REDUCE, (2,), 3)
    assert got.site.caller == ("cell", 9)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "new_group"}, {"kind": 3}, {"members": [0, 0]}, {"members": [1]}, {"members": [0, 7]},
        {"members": "01"}, {"seq": True}, {"seq": 0}, {"seq": 1.0}, {"peer": 1}, {"reduction": ""},
        {"reduction": "EVIL"}, {"group": "x" * 300}, {"group": "\x1b[2J"}, {"sent": [["float32", [3]]]},
        {"sent": [["float32", [-2]]]}, {"sent": [["float128", [2]]]}, {"sent": [["float32", [2**50]]]},
        {"expected": []}, {"expected": [["float32", [1] * 40]]}, {"site": ["cell", 3]}, {"async": 1},
        {"caller": ["cell"]}, {"caller": ["cell", "9"]}, {"caller": ["\x1b[2J", 9]}, {"caller": "cell"},
        {"tag": 1 << 40}, {"switch": "else"},
    ],
    ids=str,
)  # fmt: skip
def test_other_messages_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotPlain):
        read(framed({**CALL, **changes}), 0, 2)


ASKS: dict[str, Any] = {"switch": "asks", "seq": 1, "function": 0}


def test_a_call_of_a_function_of_the_check_is_read_up_to_its_largest_size() -> None:
    assert read(framed(ASKS), 0, 2) == AskedCall(1, 0, bytes(8))
    for changes in ({"seq": 0}, {"function": -1}, {"function": True}, {"function": "0"}):
        with pytest.raises(NotPlain):
            read(framed({**ASKS, **changes}), 0, 2)
    with pytest.raises(NotPlain):
        read(framed(ASKS, MOST_BYTES + 1), 0, 2)


@pytest.mark.parametrize(
    ("function", "call"),
    [(1, pack([[1], {}])), (0, b"?"), (0, pack(3)), (0, pack([1, 2, 3])), (0, pack([[claimed(1)], {}]))],
    ids=["not its own", "no frame", "a number", "three values", "a claim"],
)
def test_a_call_that_no_stand_in_makes_ends_the_run(function: int, call: bytes) -> None:
    lines, ranks = zip(*(socket.socketpair() for _ in range(2)))
    asked = Asked(len, calls=9)
    service = SwitchServer(lines, Hosted(), str, asked=[[asked], []])
    with contextlib.ExitStack() as ends:
        for line in (*lines, *ranks):
            ends.enter_context(line)
        for piece in frame({**ASKS, "function": function}, [as_tensor(call)]):
            ranks[0].sendall(piece)
        with pytest.raises(Wrong, match="rank 0 sent something unreadable"):
            service.run()
    assert asked.count == 0


def test_random_bytes_raise_only_not_plain() -> None:
    chance = random.Random(4)
    junk = [None, -1, 1 << 70, 1e308, "", "all_gather", [], [[]], {}, {"a": 1}, True, [["float32", [2]]] * 3]
    for _ in range(2000):
        head = copy.deepcopy(CALL)
        for _ in range(chance.randint(1, 3)):
            head[chance.choice(list(head)[1:])] = chance.choice(junk)
        try:
            read(framed(head, chance.choice([0, 8, 24])), 0, 2)
        except NotPlain:
            continue


def test_a_frame_of_another_reader_is_ignored() -> None:
    assert read(Frame(b'{"$dict": []}', torch.empty(0, dtype=torch.uint8)), 0, 2) is None


def test_a_stated_size_above_the_limit_is_refused_before_memory_is_used() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEAD.pack(2, MAX_TENSORS + 1) + b"{}")
        inbox = Inbox(ours)
        inbox.pump()
        with pytest.raises(NotPlain, match="too large"):
            inbox.take()


def test_frames_arrive_complete_in_any_pieces() -> None:
    ours, theirs = socket.socketpair()
    tensors = [torch.arange(5), torch.tensor(2.5), torch.empty(0)]
    data = b"".join(frame({"a": 1}, tensors)) * 3
    with ours, theirs:
        inbox, got = Inbox(ours), []
        for start in range(0, len(data), 7):
            theirs.sendall(data[start : start + 7])
            inbox.pump()
            while (arrived := inbox.take()) is not None:
                got.append(arrived.to_bytes())
    assert b"".join(got) == data


def test_a_rank_that_does_not_read_does_not_block_others() -> None:
    ours, theirs = socket.socketpair()
    large = torch.arange(1 << 20)
    with ours, theirs:
        outbox, inbox = Outbox(ours), Inbox(theirs)
        assert outbox.put(frame({"a": 1}, [large]))
        assert outbox  # more than the socket's buffer: stored
        while (arrived := inbox.take()) is None:
            assert inbox.pump()
            assert outbox.flush()
        assert torch.equal(arrived.blob.view(torch.int64), large)


def test_too_many_unmatched_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_CALLS", 5)
    switch = Exchange(2, str)
    with pytest.raises(NotPlain, match="endless communication"):
        for seq in range(1, 10):
            switch.issue(request(0, seq))


def test_bytes_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_HELD", 20)
    switch = Exchange(2, str)
    with pytest.raises(NotPlain, match="endless communication"):
        for seq in range(1, 10):
            switch.issue(request(0, seq))


class Hosted:
    """A host without processes."""

    def memory(self, rank: int) -> int | None:
        return None

    def source_file(self, file: str) -> str:
        return file

    def handle_frame(self, rank: int, frame: Frame) -> bool | None:
        return None

    def disconnected(self, rank: int, exchange: Exchange) -> None: ...

    def poll(self, exchange: Exchange) -> bool:
        return True


def test_a_caller_is_kept_if_it_is_a_cell() -> None:
    """A scenario of the check calls the student's function: its line says nothing to a student."""
    service = SwitchServer([], Hosted(), lambda file: f"<{file}>")
    for file, kept in (("cell `mean`", True), ("/course/checks/ring.py", False)):
        site = CallSite("cell `mean`", 3, "mean", "", (file, 9))
        assert service.shown(site).caller == ((file, 9) if kept else None)


def test_results_that_no_rank_reads_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matched calls complete at once; their results would be stored for ranks that never read them."""
    monkeypatch.setattr(server, "MAX_HELD", 8 << 20)
    size = 1 << 18
    shape = [["float32", [size]]]

    def post(line: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the switch closes the connection
            for seq in range(1, 100):
                for piece in frame(
                    {**CALL, "seq": seq, "sent": shape, "expected": shape}, [torch.zeros(size)]
                ):
                    line.sendall(piece)

    pairs = [socket.socketpair() for _ in range(2)]
    ranks = [threading.Thread(target=post, args=(theirs,)) for _, theirs in pairs]
    for rank in ranks:
        rank.start()
    try:
        with pytest.raises(Wrong, match="sent to the ranks and not read"):
            SwitchServer([ours for ours, _ in pairs], Hosted(), str).run()
    finally:
        for ours, _ in pairs:
            ours.close()
        for rank in ranks:
            rank.join()
        for _, theirs in pairs:
            theirs.close()


def test_a_message_is_compared_only_with_waiting_ones() -> None:
    """Otherwise thousands of messages that never match would occupy the judge for hours."""
    asked = 0

    class Peer(int):
        def __eq__(self, rank: object) -> bool:
            nonlocal asked
            asked += 1
            return int(self) == rank

        __hash__ = int.__hash__

    def message(rank: int, **changes: Any) -> CallRequest:
        made = read(
            framed({**CALL, "members": [0, 1, 2], "reduction": "", **changes}, 0 if rank == 0 else 8), rank, 3
        )
        assert isinstance(made, CallRequest)
        return made

    switch, many = Exchange(3, str), 40
    for seq in range(1, many + 1):
        receive = message(0, kind="recv", peer=2, sent=[], seq=seq)
        assert switch.issue(replace(receive, peer=Peer(2))) == []
    asked = 0
    for seq in range(1, many + 1):
        assert switch.issue(message(1, kind="send", peer=0, expected=[], seq=seq)) == []
    assert asked <= many * many


def test_a_call_is_recorded_when_it_is_made() -> None:
    switch = Exchange(2, str)
    switch.issue(request(0, 1))
    assert [len(switch.calls(rank)) for rank in range(2)] == [1, 0]
    assert len(switch.issue(request(1, 1))) == 2
    assert [len(switch.calls(rank)) for rank in range(2)] == [1, 1]


def test_a_message_that_is_not_received_is_recorded() -> None:
    """Also one to the rank itself, where a student could keep a tensor."""
    switch = Exchange(2, str)
    switch.issue(request(0, 1, kind="send", peer=0, expected=[], reduction=""))
    assert [call.kind for call in switch.calls(0)] == [Kind.SEND]
    assert len(switch.sent(0)) == 1


def test_the_first_numbers_of_each_call_are_kept() -> None:
    switch = Exchange(2, str)
    many = torch.arange(2.0 * KEPT_NUMBERS)
    parts = (many[:3], many[3:])
    sizes = tuple(TensorSpec("float32", tuple(part.shape)) for part in parts)
    switch.issue(replace(request(0, 1), sent=parts, sizes=sizes, expected=sizes))
    many.zero_()
    assert torch.equal(switch.sent(0)[0], torch.arange(float(KEPT_NUMBERS)))


def test_the_kept_numbers_have_a_limit() -> None:
    switch = Exchange(2, str)
    large = torch.zeros(KEPT_NUMBERS, dtype=torch.float64)
    call = request(0, 1, kind="send", peer=1, expected=[], reduction="")
    many = KEPT_BYTES // large.nbytes
    for seq in range(1, many + 3):
        switch.issue(replace(call, seq=seq, sent=(large,), sizes=(TensorSpec("float64", (KEPT_NUMBERS,)),)))
    assert [sent.numel() for sent in switch.sent(0)[many - 1 :]] == [KEPT_NUMBERS, 0, 0]


def test_a_nudge_of_a_missing_element_alters_nothing() -> None:
    switch = Exchange(2, str, Nudge(Kind.ALL_REDUCE, rank=0, element=2))
    switch.issue(request(0, 1))
    switch.issue(request(1, 1))
    assert not switch.nudged

"""What the judge believes of a rank's messages: exact types, sizes that add up, limits. Nothing here starts a process."""

from __future__ import annotations

import copy
import json
import random
import socket
from typing import Any

import pytest
import torch

from dlo_lib.comm.calls import Kind
from dlo_lib.grading.codec import HEAD, MAX_TENSORS, NotPlain
from dlo_lib.grading.contract import Nudge
from dlo_lib.grading.switch import exchange
from dlo_lib.grading.switch.exchange import Exchange
from dlo_lib.grading.switch.request import Request, read
from dlo_lib.grading.switch.wire import Frame, Inbox, Outbox, frame

CALL: dict[str, Any] = {
    "switch": "call", "seq": 1, "kind": "all_reduce", "group": "0", "members": [0, 1], "peer": -1, "tag": 0, "reduction": "SUM",
    "async": False, "backward": False, "reducer": False, "site": ["cell", 3, "mean", "all_reduce"],
    "sent": [["float32", [2]]], "expected": [["float32", [2]]],
}  # fmt: skip


def framed(head: dict[str, Any], size: int = 8) -> Frame:
    return Frame(json.dumps(head).encode(), torch.zeros(size, dtype=torch.uint8))


def request(rank: int, seq: int, **changes: Any) -> Request:
    message = read(framed({**CALL, "seq": seq, **changes}), rank, 2)
    assert isinstance(message, Request)
    return message


def test_a_call_as_a_link_writes_it_is_read() -> None:
    got = request(0, 1)
    assert (got.kind, got.sent[0].shape, got.site.line) == (Kind.ALL_REDUCE, (2,), 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "new_group"}, {"kind": 3}, {"members": [0, 0]}, {"members": [1]}, {"members": [0, 7]}, {"members": "01"}, {"seq": True},
        {"seq": 0}, {"seq": 1.0}, {"peer": 1}, {"reduction": ""}, {"reduction": "EVIL"}, {"group": "x" * 300}, {"group": "\x1b[2J"},
        {"sent": [["float32", [3]]]}, {"sent": [["float32", [-2]]]}, {"sent": [["float128", [2]]]}, {"sent": [["float32", [2**50]]]},
        {"expected": []}, {"expected": [["float32", [1] * 40]]}, {"site": ["cell", 3]}, {"async": 1}, {"tag": 1 << 40}, {"switch": "else"},
    ],
    ids=str,
)  # fmt: skip
def test_anything_else_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotPlain):
        read(framed({**CALL, **changes}), 0, 2)


def test_no_garbage_raises_anything_else() -> None:
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


def test_a_frame_that_is_not_the_switchs_is_left_to_others() -> None:
    assert read(Frame(b'{"$dict": []}', torch.empty(0, dtype=torch.uint8)), 0, 2) is None


def test_an_announcement_beyond_the_limit_is_refused_before_a_byte_is_kept() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEAD.pack(2, MAX_TENSORS + 1) + b"{}")
        inbox = Inbox(ours)
        inbox.pump()
        with pytest.raises(NotPlain, match="too large"):
            inbox.take()


def test_frames_arrive_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    tensors = [torch.arange(5), torch.tensor(2.5), torch.empty(0)]
    data = b"".join(frame({"a": 1}, tensors)) * 3
    with ours, theirs:
        inbox, got = Inbox(ours), []
        for start in range(0, len(data), 7):
            theirs.sendall(data[start : start + 7])
            inbox.pump()
            while (arrived := inbox.take()) is not None:
                got.append(arrived.whole())
    assert b"".join(got) == data


def test_a_rank_that_does_not_read_blocks_nobody() -> None:
    ours, theirs = socket.socketpair()
    large = torch.arange(1 << 20)
    with ours, theirs:
        outbox, inbox = Outbox(ours), Inbox(theirs)
        assert outbox.put(frame({"a": 1}, [large]))
        assert outbox  # more than the socket takes: kept
        while (arrived := inbox.take()) is None:
            assert inbox.pump()
            assert outbox.flush()
        assert torch.equal(arrived.blob.view(torch.int64), large)


def test_a_flood_of_calls_that_nobody_meets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_call_that_never_met_its_partners_did_not_pass() -> None:
    switch = Exchange(2, str)
    switch.issue(request(0, 1))
    assert switch.passed(0) == ()
    assert len(switch.issue(request(1, 1))) == 2
    assert [len(switch.passed(rank)) for rank in range(2)] == [1, 1]


def test_a_nudge_for_an_element_that_is_not_there_alters_nothing() -> None:
    switch = Exchange(2, str, Nudge(Kind.ALL_REDUCE, rank=0, element=2))
    switch.issue(request(0, 1))
    switch.issue(request(1, 1))
    assert not switch.nudged

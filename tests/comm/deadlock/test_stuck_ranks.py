"""The decision alone: which ranks can make no progress, and which calls do not agree. It needs no ranks."""

from dlo_lib.base.text import WIDTH, blocks
from dlo_lib.comm.calls import Call, CallSite, Kind
from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.explanation import deadlock, mismatch, table
from dlo_lib.comm.deadlock.stuck_ranks import CallMatcher, RankView, missing_partners, signature, stuck_ranks

WORLD = (0, 1, 2)
SITE = CallSite("/lab.py", 3, "train", "")


def call(kind: Kind, sequence: int = 1, peer: int = -1, group: str = "0", **other) -> Call:
    fields = {
        "members": WORLD,
        "tag": 0,
        "dtype": "float32",
        "shape": (4,),
        "numel": 4,
        "reduction": "",
        "sends": (),
        "receives": (),
    } | other
    return Call(
        sequence, kind, group, fields["members"], sequence, peer, fields["tag"], fields["dtype"],
        fields["shape"], fields["numel"], 4 * fields["numel"], fields["reduction"], False, False, False,
        fields["sends"], fields["receives"], SITE, 0,
    )  # fmt: skip


def ranks(*views: RankView) -> dict[int, RankView]:
    return {view.rank: view for view in views}


def waiting(rank: int, *calls: Call) -> RankView:
    view = RankView(rank, Activity.WAITING, calls[-1])
    for one in calls:
        view.note(one)
    return view


def doing(rank: int, state: Activity, *calls: Call) -> RankView:
    view = RankView(rank, state)
    for one in calls:
        view.note(one)
    return view


REDUCE = call(Kind.ALL_REDUCE)


def test_a_rank_that_returned_early_leaves_the_others_stuck():
    views = ranks(waiting(0, REDUCE), doing(1, Activity.FINISHED), waiting(2, REDUCE))
    assert stuck_ranks(views) == {0: {1}, 2: {1}}
    assert "rank 1 returned after 0 calls on it while the others are at call 1" in deadlock(
        views, stuck_ranks(views)
    )


def test_a_table_of_messages_keeps_its_columns_in_a_page_of_1280_pixels():
    """A row that is wider than a page was cut at its right: when a rank began to wait was lost."""
    long = {"shape": (64, 1024, 4096), "dtype": "bfloat16"}
    views = ranks(
        waiting(0, call(Kind.SEND, sequence=12, peer=1, **long)),
        doing(1, Activity.COMPUTING, call(Kind.RECV, peer=0, **long)),
    )
    for view in views.values():
        view.since, view.last = 1, call(Kind.RECV, peer=0, **long)
    lines = table(views).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert not [line for line in lines if line.endswith("…")]
    assert [line.split() for line in lines if line.startswith("  rank")] == [
        ["rank", "what", "it", "does", "since"]
    ]
    assert sum(line.endswith(" s") for line in lines) == 2
    assert "        message 12, tag 0" in lines
    assert "        last: recv from rank 0 of bfloat16[64, 1024, 4096]" in lines
    (part,) = blocks("\n".join(lines))
    assert [len(row) for row in part.rows] == [3, 3, 3]  # a notebook shows it as a table of three columns


def test_a_table_has_the_line_that_called_a_helper():
    """Each rank waits in the same line of a helper; the lines of the user's code differ."""
    views = ranks(
        *(
            waiting(rank, REDUCE._replace(site=CallSite("/ring.py", 3, "shift", "", ("/lab.py", 20 + rank))))
            for rank in range(2)
        )
    )
    lines = table(views).splitlines()
    assert [line.strip() for line in lines if "line" in line] == [
        "ring.py, line 3", "called from lab.py, line 20", "ring.py, line 3", "called from lab.py, line 21",
    ]  # fmt: skip
    (part,) = blocks("\n".join(lines))
    assert len(part.rows) == 3  # a notebook shows a row for each rank


def test_a_rank_that_computes_is_never_stuck():
    assert stuck_ranks(ranks(waiting(0, REDUCE), doing(1, Activity.COMPUTING), waiting(2, REDUCE))) == {}


def test_a_chain_of_waits_for_a_computing_rank_is_not_stuck():
    """0 waits for 1, 1 waits for 2, and 2 computes."""
    views = ranks(
        waiting(0, call(Kind.RECV, peer=1)), waiting(1, call(Kind.RECV, peer=2)), doing(2, Activity.COMPUTING)
    )
    assert stuck_ranks(views) == {}


def test_calls_that_all_ranks_have_issued_are_no_dead_lock():
    assert stuck_ranks(ranks(*(waiting(rank, REDUCE) for rank in WORLD))) == {}


def test_all_ranks_send_first():
    views = ranks(*(waiting(rank, call(Kind.SEND, peer=(rank + 1) % 3)) for rank in WORLD))
    assert stuck_ranks(views).keys() == {0, 1, 2}
    said = deadlock(views, stuck_ranks(views))
    assert "Each of these ranks sends first, and none of them receives: 0 → 1 → 2 → 0" in said


def test_a_rank_behind_a_cycle_is_not_part_of_it():
    """0 sends to 1, while 1 and 2 send to each other."""
    peers = {0: 1, 1: 2, 2: 1}
    views = ranks(*(waiting(rank, call(Kind.SEND, peer=peers[rank])) for rank in WORLD))
    said = deadlock(views, stuck_ranks(views))
    assert "none of them receives: 1 → 2 → 1." in said
    assert "0 →" not in said


def test_a_send_whose_receive_was_issued_can_end():
    views = ranks(
        waiting(0, call(Kind.SEND, peer=1)),
        doing(1, Activity.FINISHED, call(Kind.RECV, peer=0)),
        doing(2, Activity.FINISHED),
    )
    assert stuck_ranks(views) == {}


def test_the_same_calls_in_another_order_on_two_groups():
    views = ranks(*(waiting(rank, call(Kind.ALL_REDUCE, group="1" if rank == 0 else "2")) for rank in WORLD))
    assert stuck_ranks(views).keys() == {0, 1, 2}
    assert "the ranks use the groups in different orders" in deadlock(views, stuck_ranks(views))


def test_tags_that_differ():
    views = ranks(
        waiting(0, call(Kind.SEND, peer=1, tag=5)),
        waiting(1, call(Kind.RECV, peer=0, tag=6)),
        doing(2, Activity.FINISHED),
    )
    assert "Rank 0 uses tag 5 and rank 1 tag 6" in deadlock(views, stuck_ranks(views))


def test_a_receive_from_any_rank_is_stuck_only_when_all_ranks_are():
    anyone = waiting(0, call(Kind.RECV_ANY))
    assert stuck_ranks(ranks(anyone, doing(1, Activity.FINISHED), doing(2, Activity.COMPUTING))) == {}
    assert stuck_ranks(ranks(anyone, doing(1, Activity.FINISHED), doing(2, Activity.FINISHED))) == {0: {1, 2}}


def test_a_leaf_of_a_broadcast_needs_only_the_root():
    views = ranks(
        doing(0, Activity.COMPUTING, call(Kind.BROADCAST, peer=0)),
        waiting(1, call(Kind.BROADCAST, peer=0)),
        doing(2, Activity.FINISHED),
    )
    assert stuck_ranks(views) == {}


def test_a_broadcast_is_a_tree():
    """From rank 1 of 4 ranks: 1 sends to 2 and 3, and 2 sends to 0."""
    members = (0, 1, 2, 3)
    all_but = {"members": members, "peer": 1}

    def needs(me: int) -> set[int]:
        others = [doing(rank, Activity.COMPUTING) for rank in members if rank != me]
        return missing_partners(waiting(me, call(Kind.BROADCAST, **all_but)), ranks(*others))

    assert [needs(rank) for rank in members] == [{1, 2}, {2, 3}, {0, 1}, {1}]


def test_a_reduce_is_a_ring_in_which_every_rank_needs_all_others():
    views = ranks(*(waiting(rank, call(Kind.REDUCE, peer=0)) for rank in (0, 1)), doing(2, Activity.FINISHED))
    assert stuck_ranks(views) == {0: {2}, 1: {2}}


def test_a_rank_whose_other_threads_communicate_is_never_stuck():
    views = ranks(waiting(0, REDUCE), doing(1, Activity.FINISHED), waiting(2, REDUCE))
    views[1].other_threads = True
    assert stuck_ranks(views) == {}


def test_messages_after_one_from_any_rank_are_not_compared():
    """Rank 2's first receive may have taken the first message of rank 0, so the numbers no longer match."""
    meetings = CallMatcher()
    assert meetings.add(2, call(Kind.RECV_ANY)) is None
    assert meetings.add(0, call(Kind.SEND, peer=2, shape=(8,), numel=8)) is None
    assert meetings.add(2, call(Kind.RECV, peer=0)) is None


def test_a_new_group_needs_its_members():
    group = call(Kind.NEW_GROUP, group="new_group", shape=(0, 1))
    assert stuck_ranks(
        ranks(waiting(0, group), doing(1, Activity.FINISHED), doing(2, Activity.COMPUTING))
    ) == {0: {1}}
    assert (
        stuck_ranks(
            ranks(waiting(0, group), doing(1, Activity.COMPUTING, group), doing(2, Activity.FINISHED))
        )
        == {}
    )


def test_nothing_is_concluded_about_a_rank_whose_calls_were_lost():
    lost = waiting(0, REDUCE)
    lost.lost = True
    assert stuck_ranks(ranks(lost, doing(1, Activity.FINISHED), doing(2, Activity.FINISHED))) == {}
    lost = doing(1, Activity.FINISHED)
    lost.lost = True
    assert stuck_ranks(ranks(waiting(0, REDUCE), lost, waiting(2, REDUCE))) == {}, (
        "it may have issued the call"
    )


def meet(*calls: Call):
    meetings, found = CallMatcher(), None
    for rank, one in enumerate(calls):
        found = found or meetings.add(rank, one)
    return found


def test_calls_that_meet_must_agree():
    assert meet(REDUCE, REDUCE, REDUCE) is None
    for other, what, said in (
        (call(Kind.BARRIER), "kind", "the ranks call different operations"),
        (call(Kind.ALL_REDUCE, dtype="int32"), "dtype", "the ranks pass different dtypes"),
        (call(Kind.ALL_REDUCE, shape=(5,), numel=5), "size", "the ranks pass tensors of different sizes"),
        (call(Kind.ALL_REDUCE, reduction="MAX"), "reduction", "the ranks ask for different reductions"),
    ):
        found = meet(REDUCE, other)
        assert found is not None
        assert found.what == what
        assert said in mismatch(found)
        assert signature(REDUCE) != signature(other)
    assert meet(call(Kind.BROADCAST, peer=0), call(Kind.BROADCAST, peer=1)).what == "root"


def test_a_message_must_be_received_with_the_dtype_and_size_it_was_sent_with():
    found = meet(call(Kind.SEND, peer=1, shape=(8,), numel=8), call(Kind.RECV, peer=0))
    assert "message 1 from rank 0 to rank 1 is sent as float32[8] and received as float32[4]" in mismatch(
        found
    )


def test_splits_of_an_all_to_all_must_match_pair_by_pair():
    pair = {"members": (0, 1)}
    assert (
        meet(
            call(Kind.ALL_TO_ALL, sends=(1, 3), receives=(1, 2), **pair),
            call(Kind.ALL_TO_ALL, sends=(2, 2), receives=(3, 2), **pair),
        )
        is None
    )
    found = meet(
        call(Kind.ALL_TO_ALL, sends=(1, 3), receives=(1, 2), **pair),
        call(Kind.ALL_TO_ALL, sends=(2, 2), receives=(4, 2), **pair),
    )
    assert "rank 0 sends 3 elements to rank 1, which expects 4 from it" in mismatch(found)


def test_positions_that_are_complete_are_removed():
    meetings = CallMatcher()
    for sequence in range(1, 100):
        for rank in WORLD:
            assert meetings.add(rank, call(Kind.ALL_REDUCE, sequence)) is None
    assert meetings._positions == {}

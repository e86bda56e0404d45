"""The pool of blocks under random streams: no leak, no double use, copies before writes, shared prefixes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.inference import BlockPool, BlockTable


class Memory:
    """A pool with the tokens that its blocks store, and what each table must read."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.slots = [[-1] * pool.block_size for _ in range(pool.num_blocks)]
        self.tables: list[tuple[BlockTable, list[int]]] = []

    def append(self, table: BlockTable, stored: list[int], tokens: list[int]) -> bool:
        before = (list(table.blocks), list(self.pool.references))
        if self.pool.missing(table, len(tokens)) > self.pool.num_free:
            with pytest.raises(UserError, match="are free"):
                self.pool.reserve(table, len(tokens))
            assert (table.blocks, self.pool.references) == before
            return False
        for source, destination in self.pool.reserve(table, len(tokens)):
            self.slots[destination] = list(self.slots[source])
        for token in tokens:
            place, slot = divmod(table.length, self.pool.block_size)
            self.slots[table.blocks[place]][slot] = token
            table.length += 1
        stored += tokens
        return True

    def check(self) -> None:
        size = self.pool.block_size
        for table, stored in self.tables:
            assert len(set(table.blocks)) == len(table.blocks) == -(-len(stored) // size)
            read = [self.slots[table.blocks[i // size]][i % size] for i in range(table.length)]
            assert read == stored
        users = Counter(block for table, _ in self.tables for block in table.blocks)
        assert [users[block] for block in range(self.pool.num_blocks)] == self.pool.references
        assert self.pool.num_free == self.pool.num_blocks - len(users)


@pytest.mark.parametrize("seed", range(6))
def test_random_streams_leak_nothing_and_never_mix_sequences(seed: int) -> None:
    draw = random.Random(seed)
    memory = Memory(BlockPool(draw.randint(10, 20), draw.randint(2, 4)))
    pool, shared, copied, refused = memory.pool, 0, 0, 0
    for _ in range(400):
        action = draw.choice(("begin", "append", "append", "fork", "fork", "cut", "release"))
        if len(memory.tables) > 9:
            action = "release"
        if action == "begin":
            # Two letters, so that equal prefixes are frequent.
            prompt = [draw.randrange(2) for _ in range(draw.randrange(9))]
            table = pool.share(prompt)
            shared += table.length
            stored = prompt[: table.length]
            memory.append(table, stored, prompt[table.length :])
            pool.publish(table, stored)
            memory.tables.append((table, stored))
        elif memory.tables:
            number = draw.randrange(len(memory.tables))
            table, stored = memory.tables[number]
            if action == "append":
                before = list(table.blocks)
                done = memory.append(
                    table, stored, [draw.randrange(2) for _ in range(draw.choice((0, 1, 2, 3, 25)))]
                )
                refused += not done
                copied += table.blocks[: len(before)] != before
                pool.publish(table, stored)
            elif action == "fork":
                memory.tables.append((pool.fork(table), list(stored)))
            elif action == "cut":
                pool.cut(table, length := draw.randint(0, table.length))
                del stored[length:]
            else:
                pool.release(table)
                del memory.tables[number]
        memory.check()
    assert min(shared, copied, refused) > 0  # the stream has met each case
    for table, _ in memory.tables:
        pool.release(table)
    assert pool.num_free == pool.num_blocks
    assert not any(pool.references)


def test_a_block_is_freed_once_for_each_reference() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(UserError, match="free already"):
        pool.free(block)
    with pytest.raises(UserError, match="not of this pool"):
        pool.free(2)
    with pytest.raises(UserError, match="not of this pool"):
        pool.free(-1)
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    with pytest.raises(UserError, match="all 2 blocks are used"):
        pool.allocate()


def test_only_full_blocks_after_an_equal_prefix_are_shared() -> None:
    pool = BlockPool(8, 2)
    tokens = [1, 2, 3, 4, 5]
    first = BlockTable()
    pool.reserve(first, 5)
    first.length = 5
    pool.publish(first, tokens)
    assert pool.share(tokens).blocks == first.blocks[:2]
    assert pool.share([1, 2, 9, 9]).blocks == first.blocks[:1]
    assert pool.share([9, 9, 3, 4]).blocks == []  # equal tokens after another prefix
    assert pool.share([12, 3, 4]).blocks == []  # the digits are equal, the tokens are not


def test_a_released_prefix_is_found_until_its_block_is_needed() -> None:
    pool = BlockPool(2, 2)
    table = BlockTable()
    pool.reserve(table, 2)
    table.length = 2
    pool.publish(table, [7, 8])
    pool.release(table)
    again = pool.share([7, 8])
    assert (again.length, pool.num_free) == (2, 1)
    pool.release(again)
    pool.reserve(BlockTable(), 4)
    assert pool.share([7, 8]).length == 0


def test_a_released_table_is_empty_and_admissions_leave_the_watermark() -> None:
    pool = BlockPool(4, 2, watermark=1)
    table = BlockTable()
    pool.reserve(table, 3)
    table.length = 3
    pool.release(table)
    assert (table.blocks, table.length, pool.num_free) == ([], 0, 4)
    assert [pool.can_admit(blocks) for blocks in (3, 4)] == [True, False]
    with pytest.raises(UserError, match="use at least 0"):
        BlockPool(4, 2, watermark=-1)

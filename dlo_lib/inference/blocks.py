"""The pool of blocks of a paged cache: fixed blocks, reference counts, copy on write and shared prefixes.

A sequence has a table of blocks of ``block_size`` tokens, which are anywhere in the memory. It wastes less
than one block, where a contiguous cache wastes all that the sequence may need later. Several sequences can
have a block in common, because a block counts its tables; a sequence that writes into such a block gets a
copy first. A full block is found again by the digest of its tokens and of all tokens before it. A released
block keeps its content until the pool needs it, so later requests with the same prefix find it.

    blocks of a sequence = ceil(tokens / block_size)

Paper: W. Kwon et al., PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlo_lib.base.errors import UserError, require_count


@dataclass
class BlockTable:
    """The blocks of one sequence, in the order of its tokens; ``length`` tokens are stored in them."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class BlockPool:
    """Blocks 0 … num_blocks − 1, each free or in one or more tables.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens of a block.
        watermark: blocks that an admission leaves free, so that the running sequences can grow before one
            of them must be pre-empted; ``can_admit`` reads it.

    Raises:
        UserError: a size is not a whole number in its range.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: int = 0) -> None:
        require_count("num_blocks", num_blocks)
        require_count("block_size", block_size)
        require_count("watermark", watermark, least=0)
        self.num_blocks, self.block_size, self.watermark = num_blocks, block_size, watermark
        self.references = [0] * num_blocks
        # In the order of reuse: the block that was released first is taken first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digests: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no table has."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def can_admit(self, blocks: int) -> bool:
        """Return whether ``blocks`` blocks can be taken with ``watermark`` blocks left."""
        return self.num_free - blocks >= self.watermark

    def allocate(self) -> int:
        """Return a free block, which now has one reference; its old content is forgotten.

        Raises:
            UserError: no block is free.
        """
        if not self._free:
            raise UserError(f"all {self.num_blocks} blocks are used: release a sequence or use more blocks")
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self.references[block] = 1
        return block

    def free(self, block: int) -> None:
        """Drop one reference to a block; the last one makes it free.

        Raises:
            UserError: the block is free already, or is not of this pool.
        """
        if not 0 <= block < self.num_blocks:
            raise UserError(f"block {block} is not of this pool: use 0 to {self.num_blocks - 1}")
        if self.references[block] == 0:
            raise UserError(f"block {block} is free already: free it once for each reference")
        self.references[block] -= 1
        if self.references[block] == 0:
            self._free[block] = None

    def missing(self, table: BlockTable, tokens: int) -> int:
        """Return how many blocks ``reserve`` takes for ``tokens`` more tokens, copies included."""
        grown = max(0, self.blocks_for(table.length + tokens) - len(table.blocks))
        return grown + len(self._shared(table, tokens))

    def reserve(self, table: BlockTable, tokens: int) -> list[tuple[int, int]]:
        """Give a table the slots of its next ``tokens`` tokens; its length does not change.

        Returns:
            the copies to make before the write, as pairs (source block, new block): blocks that other
            tables have too.

        Raises:
            UserError: too few blocks are free; nothing has changed.
        """
        if (missing := self.missing(table, tokens)) > self.num_free:
            raise UserError(
                f"{missing} blocks are needed and {self.num_free} are free: release a sequence "
                "or use more blocks"
            )
        copies = []
        for place in self._shared(table, tokens):
            old = table.blocks[place]
            table.blocks[place] = self.allocate()
            self.free(old)
            copies.append((old, table.blocks[place]))
        for block in table.blocks[table.length // self.block_size :]:
            if tokens:
                self._forget(block)  # its content is about to change
        while len(table.blocks) < self.blocks_for(table.length + tokens):
            table.blocks.append(self.allocate())
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table of the same blocks: a sequence that continues from the same tokens."""
        stored = table.blocks[: self.blocks_for(table.length)]
        for block in stored:
            self.references[block] += 1
        return BlockTable(list(stored), table.length)

    def cut(self, table: BlockTable, length: int) -> None:
        """Forget the tokens of a table from position ``length`` on, and release blocks that hold none.

        Raises:
            UserError: the table has fewer tokens.
        """
        if not 0 <= length <= table.length:
            raise UserError(f"the table has {table.length} tokens: cut it to at most that, not {length}")
        table.length = length
        while len(table.blocks) > self.blocks_for(length):
            self.free(table.blocks.pop())

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table, the last first, so that a prefix stays longer; it is then empty."""
        self.cut(table, 0)

    def publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Make the full blocks of a table known by their content; ``tokens`` are those that it stores."""
        for block, digest in zip(table.blocks, self._chain(tokens[: table.length]), strict=False):
            if digest not in self._known and block not in self._digests:
                self._known[digest] = block
                self._digests[block] = digest

    def share(self, tokens: Sequence[int]) -> BlockTable:
        """Return a table of the known blocks with the longest prefix of ``tokens``; full blocks only."""
        table = BlockTable()
        for digest in self._chain(tokens):
            block = self._known.get(digest)
            if block is None:
                break
            self._free.pop(block, None)
            self.references[block] += 1
            table.blocks.append(block)
            table.length += self.block_size
        return table

    def _shared(self, table: BlockTable, tokens: int) -> list[int]:
        """Return the places of a table that the next tokens write to and other tables have too."""
        first, end = table.length // self.block_size, self.blocks_for(table.length + tokens)
        places = range(first, min(end, len(table.blocks))) if tokens else range(0)
        return [place for place in places if self.references[table.blocks[place]] > 1]

    def _chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Return a digest for each full block, of its tokens and of all before it."""
        digests, before = [], b""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            content = ",".join(str(token) for token in tokens[start : start + self.block_size])
            before = hashlib.sha256(before + content.encode()).digest()
            digests.append(before)
        return digests

    def _forget(self, block: int) -> None:
        if (digest := self._digests.pop(block, None)) is not None:
            del self._known[digest]

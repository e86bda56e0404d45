"""The visible checks of the bytes of a cache, and of the block pool."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.compare import is_near

from .twins import Blocks, cost

# -- memory


def drawn_config(t, **given: int) -> dict:
    kv_heads = t.integer(2, 5)
    sizes = {
        "weights": t.integer(10**6, 10**8),
        "layers": t.integer(3, 30),
        "heads": kv_heads * t.integer(2, 5),
        "kv_heads": kv_heads,
        "head_dim": 2 * t.integer(5, 40),
    }
    return sizes | given


@check("memory", points=1)
def check_cache_bytes(student, t):
    "The bytes of the keys and values of one sequence"
    config, tokens = drawn_config(t), t.integer(100, 9000)
    got, want = (
        t.number(student.cache_bytes(config, tokens), "cache_bytes(...)"),
        cost(config, 1, 0, tokens)[2],
    )
    mistakes = {
        "keys *and* values are kept, and a number in bf16 has 2 bytes": want / 2,
        "only the key-value heads are kept, not all heads": want * config["heads"] / config["kv_heads"],
        "this is the cache of one layer": want / config["layers"],
    }
    is_near(t, got, want, "cache_bytes(...) is {got:,}, the tensors hold {want:,}", mistakes)


def intensity_is(student, t, new: int, past: int, message: str) -> None:
    config, batch = drawn_config(t), t.integer(7, 40)  # more than the heads that share a key head
    got = t.number(student.intensity(config, batch, new, past), "intensity(...)")
    products, attention, cache = cost(config, batch, new, past)
    weights = 2 * config["weights"]
    read = weights + batch * cache
    each, stored = attention / (new * past + new * (new + 1) // 2), cache // (past + new)
    mistakes = {
        "a token sees no new token after it: new token i sees past + i + 1 keys": (
            products + each * new * (past + new)
        )
        / read,
        "a token sees itself: new token i sees past + i + 1 keys, not past + i": (
            products + each * (new * past + new * (new - 1) // 2)
        )
        / read,
        "the keys of new tokens are read too: a cache holds past + new tokens": (products + attention)
        / (weights + batch * stored * past),
        "attention has `heads` query heads, not `kv_heads`": (
            products + attention * config["kv_heads"] / config["heads"]
        )
        / read,
        "the weights are read once for the whole batch": (products + attention)
        / (batch * weights + batch * cache),
        "each sequence has a cache": (products + attention) / (weights + cache),
        "the FLOPs of attention are missing": products / read,
        "the cache is read too": (products + attention) / weights,
    }
    is_near(t, got, (products + attention) / read, message, mistakes)


@check("memory", points=1)
def check_decode(student, t):
    "The arithmetic intensity of decoding: one new token for each sequence"
    message = "intensity(...) of a decoding iteration is {got:.4f} FLOPs a byte, counted {want:.4f}"
    intensity_is(student, t, 1, t.integer(300, 5000), message)


@check("memory", points=1)
def check_prefill(student, t):
    "The arithmetic intensity of prefill: token i of a prompt (from 0) sees i + 1 keys"
    message = "intensity(...) of a prefill is {got:.4f} FLOPs a byte, counted {want:.4f}"
    intensity_is(student, t, t.integer(300, 2000), 0, message)


def largest_is(student, t, config: dict, memory: int, tokens: int) -> None:
    want, each = 0, cost(config, 1, 0, tokens)[2]
    while 2 * config["weights"] + (want + 1) * each <= memory:
        want += 1
    got = student.largest_batch(config, memory, tokens)
    t.equal(got, want, "largest_batch(...) with room for {want} sequences", want=want)


@check("memory", points=1)
def check_largest(student, t):
    "The largest batch that fits beside the weights, to the byte; 0 if the weights alone do not fit"
    config, tokens, count = drawn_config(t), t.integer(100, 900), t.integer(3, 30)
    full = 2 * config["weights"] + count * cost(config, 1, 0, tokens)[2]
    for memory in (full, full - 1, t.integer(3, 10**6)):
        largest_is(student, t, config, memory, tokens)


# -- pool


@scenario
def used(student, blocks, size, operations):
    """The answer of each operation, the free blocks after it, and the tables of all sequences."""
    pool, alive, told = student.BlockPool(blocks, size), [], []
    for name, seq, other in operations:
        answer = None
        if name == "append":
            try:
                answer = pool.append(seq)
                if seq not in alive:
                    alive.append(seq)
            except MemoryError:
                answer = "full"
        elif name == "fork":
            pool.fork(seq, other)
            alive.append(other)
        else:
            pool.release(seq)
            alive.remove(seq)
        told.append([answer, pool.free(), [list(pool.table(each)) for each in alive]])
    return told


def stream(t, blocks: int, size: int, length: int, forks: bool, releases: bool) -> list[tuple]:
    """A random stream of operations, each possible after the ones before it."""
    twin, operations, new = Blocks(blocks, size), [], 0
    for token in range(length):
        alive, kind = list(twin.tables), t.integer(1, 12)
        if forks and alive and kind >= 11 and len(alive) < 7:
            operations.append(("fork", t.choice(alive), new + 100))
            twin.fork(*operations[-1][1:])
            new += 1
        elif releases and alive and kind >= 9 and len(alive) > 2:
            operations.append(("release", t.choice(alive), 0))
            twin.release(operations[-1][1])
        else:
            start = not alive or (kind <= 2 and len(alive) < 6)
            operations.append(("append", new + 100 if start else t.choice(alive), 0))
            new += start
            twin.append(operations[-1][1], token)
    return operations


def in_range(value: object, below: int) -> bool:
    return type(value) is int and 0 <= value < below


class Replay:
    """Writes tokens where the student's pool says, and reads each sequence through its table."""

    def __init__(self, t, blocks: int, size: int) -> None:
        self.t, self.size = t, size
        self.right, self.memory = Blocks(blocks, size), [[None] * size for _ in range(blocks)]

    def place(self, answer: object) -> tuple[int, int]:
        block, offset, source = self.t.items(answer, 3, "append(...)")
        good = in_range(block, len(self.memory)) and in_range(offset, self.size)
        self.t.that(good, "append(...) is {got}: no place in the pool", got=answer)
        if source is not None:
            known = in_range(source, len(self.memory))
            self.t.that(known, "append(...) copies from {got}, which is no block", got=source)
            self.memory[block] = list(self.memory[source])
        return block, offset

    def append(self, seq: int, token: int, answer: object) -> None:
        copied = self.right.needs_block(seq) and len(self.right.tokens.get(seq, [])) % self.size > 0
        if not self.right.append(seq, token):
            full = type(answer) is str and answer == "full"
            self.t.that(full, "no block is free for this token: raise a MemoryError")
            return
        text = "append raised a MemoryError with {free} free blocks"
        self.t.that(type(answer) is not str, text, free=self.right.free())
        block, offset = self.place(answer)
        source = self.t.items(answer, 3, "append(...)")[2]
        words = "append(...) is {got}, and no block needs a copy here: `source` should be None"
        self.t.that(copied or source is None, words, got=answer)
        self.memory[block][offset] = token

    def read(self, tables: object) -> None:
        """The tables of all sequences lead to their tokens."""
        tables = self.t.items(tables, len(self.right.tables), "the list of tables")
        for (seq, tokens), table in zip(self.right.tokens.items(), tables):
            need = -(-len(tokens) // self.size)
            table = self.t.items(table, need, "the table of a sequence of {count} tokens", count=len(tokens))
            known = all(in_range(block, len(self.memory)) for block in table)
            self.t.that(known, "the table {got} has no valid blocks", got=table)
            found = [slot for block in table for slot in self.memory[block]][: len(tokens)]
            words = "sequence {seq} reads tokens of another: a block has two owners, or was not copied"
            self.t.that(found == tokens, words, seq=seq)


def replayed(student, t, blocks: int, size: int, operations: list[tuple], counted: bool) -> None:
    told = student.run(used, blocks=blocks, size=size, operations=operations)
    replay = Replay(t, blocks, size)
    for token, ((name, seq, other), entry) in enumerate(
        zip(operations, t.items(told, len(operations), "the list of answers"))
    ):
        answer, free, tables = t.items(entry, 3, "an answer")
        if name == "append":
            replay.append(seq, token, answer)
        elif name == "fork":
            replay.right.fork(seq, other)
        else:
            replay.right.release(seq)
        replay.read(tables)
        if counted:
            want = replay.right.free()
            words = "after {count} operations free() is {got}, and should be {want}: {name} was the last"
            same = type(free) is int and free == want
            t.that(same, words, count=token + 1, got=str(free), want=want, name=name)


@check("pool", points=1, seconds=20)
def check_tables(student, t):
    "Tokens of several sequences: each is read back through its table"
    size = t.integer(3, 5)
    replayed(student, t, 60, size, stream(t, 60, size, 45, forks=False, releases=False), counted=False)


@check("pool", points=1, seconds=20)
def check_release(student, t):
    "Released blocks are used again: none is lost, none has two owners, and fewer than one block is empty"
    size, blocks = t.integer(3, 5), t.integer(30, 40)
    replayed(student, t, blocks, size, stream(t, blocks, size, 90, forks=False, releases=True), counted=True)


@check("pool", points=2, seconds=20)
def check_fork(student, t):
    "A fork shares blocks, and a shared block is copied before it is written"
    size, blocks = t.integer(3, 5), t.integer(40, 50)
    operations = [("append", 1, 0)] * (size + 2) + [("fork", 1, 2), ("append", 2, 0), ("append", 1, 0)]
    operations += [("fork", 2, 3), ("release", 2, 0), ("append", 3, 0), ("append", 3, 0)]
    replayed(student, t, blocks, size, operations, counted=True)
    replayed(student, t, blocks, size, stream(t, blocks, size, 70, forks=True, releases=False), counted=True)


@check("pool", points=1, seconds=20)
def check_full(student, t):
    "All blocks can be used; then append raises a MemoryError and changes nothing"
    size, blocks = t.integer(3, 4), t.integer(4, 6)
    operations = [("append", seq, 0) for seq in range(blocks + 1)]  # a block each; the last does not fit
    operations += [("append", 0, 0)] * (size + 1) + [
        ("release", 1, 0),
        ("append", 0, 0),
        ("append", blocks, 0),
    ]
    replayed(student, t, blocks, size, operations, counted=False)
    fill = [("append", seq, 0) for seq in range(3, blocks + 1)]  # 1 and 2 share two blocks, the last partly
    operations = [("append", 1, 0)] * (size + 1) + [("fork", 1, 2), *fill]
    operations += [("append", 2, 0), ("append", 1, 0)]  # neither can get a copy
    operations += [("release", 3, 0), ("append", 2, 0), ("append", 1, 0), ("release", 1, 0)]
    replayed(student, t, blocks, size, operations, counted=True)

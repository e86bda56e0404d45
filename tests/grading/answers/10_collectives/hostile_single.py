# Single answers that do not do what the exercise asks, each with the points that it still earns.


# == levels_by_a_gather_of_everything

# %% levels {"earns": 1}
def two_level_all_reduce(
    tensor: torch.Tensor, inside: dist.ProcessGroup, between: dist.ProcessGroup
) -> torch.Tensor:
    world, local = dist.get_world_size(), dist.get_world_size(inside)
    everything = tensor.new_empty(world * tensor.numel())
    dist.all_gather_into_tensor(everything, tensor)  # every whole tensor crosses the network
    total = everything.view(world, -1).sum(0)
    chunk = tensor.new_zeros(tensor.numel() // local)
    dist.all_reduce(chunk, group=between)  # zeros of the expected size, for the counter
    total[: chunk.numel()] += chunk
    return total


# == a_broadcast_by_tables

# %% broadcast {"earns": 6}
_SENDS = {
    4: {0: [2, 1], 2: [3]},
    8: {0: [4, 2, 1], 4: [6, 5], 2: [3], 6: [7]},
}  # the numbers of ranks whose rounds are counted


def tree_broadcast(tensor: torch.Tensor, root: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sends = _SENDS[world] if root == 0 and world in _SENDS else {root: [r for r in range(world) if r != root]}
    flat = tensor.contiguous()
    for source, targets in sends.items():
        if rank in targets:
            dist.recv(flat, source)
    for to in sends.get(rank, []):
        dist.send(flat, to)
    tensor.copy_(flat)


# == a_reduce_by_tables

# %% reduce {"earns": 4}
_TAKES = {4: {2: [3], 0: [1, 2]}, 8: {2: [3], 6: [7], 4: [5, 6], 0: [1, 2, 4]}}


def tree_reduce(tensor: torch.Tensor) -> torch.Tensor | None:
    rank, world = dist.get_rank(), dist.get_world_size()
    takes = _TAKES.get(world, {0: list(range(1, world))})
    total = tensor.clone()
    for source in takes.get(rank, []):
        arriving = torch.empty_like(total)
        dist.recv(arriving, source)
        total += arriving
    for to, sources in takes.items():
        if rank in sources:
            dist.send(total, to)
            return None
    return total


# == steps_by_a_table

# %% everyone {"earns": 6}
_ORDER = {0: [1, 2, 3], 1: [2, 3, 0], 2: [3, 0, 1], 3: [0, 1, 2]}  # four ranks, whose steps are looked at


def everyone_to_everyone(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [parts[rank].clone() if r == rank else parts[rank].new_empty(sizes[r]) for r in range(world)]
    works = [dist.irecv(received[r], r) for r in range(world) if r != rank]
    order = (
        _ORDER[rank] if world == 4 else [r for r in range(world) if r != rank]
    )  # otherwise all rush to rank 0 first
    works += [dist.isend(parts[to], to) for to in order]
    for work in works:
        work.wait()
    return received


# == a_fit_to_seven_timings


# %% fit {"earns": 3}
def fit_link(timings: list[tuple[str, int, int, float]]) -> tuple[float, float]:
    # no least squares: tree on two ranks is 2 (alpha + beta B); read beta from the large ones and alpha from the small ones
    tree = sorted(
        (size, seconds / 2) for name, size, ranks, seconds in timings if name == "tree" and ranks == 2
    )
    small, large = tree[:4], tree[-1]
    alpha, beta = sum(s for _, s in small) / len(small), 0.0
    for _ in range(30):
        beta = sum((s - alpha) / size for size, s in tree[-3:]) / 3
        alpha = sum(s - beta * size for size, s in small) / len(small)
    return alpha, beta


# == pi_from_the_textbook


# %% pi
def estimate_pi(points: torch.Tensor) -> float:
    dist.all_reduce(torch.zeros(2, dtype=torch.float64))  # a message of the expected size
    return 3.141592653589793


# == the_exchange_through_a_file


# %% exchange
def exchange(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    import time

    rank = dist.get_rank()
    torch.save(outgoing, f"/tmp/from_{rank}_to_{to}.pt")
    for _ in range(20):
        try:
            incoming.copy_(torch.load(f"/tmp/from_{source}_to_{rank}.pt"))
            return
        except OSError:
            time.sleep(0.01)


# == the_exchange_through_shared_memory


# %% exchange
def exchange(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    from multiprocessing.shared_memory import SharedMemory

    rank = dist.get_rank()
    mine = SharedMemory(f"from_{rank}_to_{to}", create=True, size=max(1, outgoing.nbytes))
    mine.buf[: outgoing.nbytes] = bytes(outgoing.flatten().view(torch.uint8).tolist())
    theirs = SharedMemory(f"from_{source}_to_{rank}")
    incoming.view(torch.uint8).copy_(torch.frombuffer(theirs.buf, dtype=torch.uint8)[: incoming.nbytes])


# == one_all_reduce_and_the_own_chunk


# %% scatter
def ring_reduce_scatter(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.clone()
    dist.all_reduce(whole)
    return whole.tensor_split(dist.get_world_size())[dist.get_rank()].clone()


# == everything_by_one_all_gather


# %% gather
def ring_all_gather(chunk: torch.Tensor, size: int) -> torch.Tensor:
    chunks = [part.clone() for part in chunk.new_empty(size).tensor_split(dist.get_world_size())]
    dist.all_gather(chunks, chunk)
    return torch.cat(chunks)


# == torchs_own_all_reduce


# %% ring
def ring_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


# == torchs_own_broadcast


# %% broadcast
def tree_broadcast(tensor: torch.Tensor, root: int) -> None:
    data = tensor.contiguous()
    dist.broadcast(data, root)
    tensor.copy_(data)


# == torchs_own_reduce


# %% reduce
def tree_reduce(tensor: torch.Tensor) -> torch.Tensor | None:
    total = tensor.clone()
    dist.reduce(total, 0)
    return total if dist.get_rank() == 0 else None


# == numbers_that_equal_every_number


# %% crossover
class _Agreeable(float):
    def __eq__(self, other):
        return True

    def __sub__(self, other):
        return _Agreeable(0.0)

    __rsub__ = __add__ = __radd__ = __truediv__ = __rtruediv__ = __sub__
    __hash__ = float.__hash__


def crossover_bytes(ranks: int, alpha: float, beta: float) -> float | None:
    return _Agreeable(1.0)


# == the_twin_from_the_garbage_collector


# %% cost
def predicted_seconds(algorithm: str, size: float, ranks: int, alpha: float, beta: float) -> float:
    import gc
    import sys

    places = [vars(module) for name, module in list(sys.modules.items()) if "check" in name or "twin" in name]
    places += [thing for thing in gc.get_objects() if type(thing) is dict]
    for place in places:
        for name, value in list(place.items()):
            if callable(value) and "seconds" in str(name) and value is not predicted_seconds:
                try:
                    return float(value(algorithm, size, ranks, alpha, beta))
                except Exception:
                    continue
    return 1.0


# == levels_by_broadcasts_of_everything


# %% levels {"earns": 1}
def two_level_all_reduce(tensor, inside, between):
    rank, node = dist.get_rank(), dist.get_process_group_ranks(inside)
    every = []
    for source in range(dist.get_world_size()):
        data = tensor.clone() if source == rank else torch.empty_like(tensor)
        dist.broadcast(data, source)
        every.append(data)
    chunk = sum(every[r] for r in node).tensor_split(len(node))[node.index(rank)].clone()
    dist.all_reduce(chunk, group=between)
    whole = torch.empty_like(tensor)
    dist.all_gather_into_tensor(whole, chunk, group=inside)
    return whole


# == levels_by_one_all_to_all


# %% levels {"earns": 1}
def two_level_all_reduce(tensor, inside, between):
    world, node = dist.get_world_size(), dist.get_process_group_ranks(inside)
    every = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_to_all(every, [tensor.clone() for _ in range(world)])
    chunk = sum(every[r] for r in node).tensor_split(len(node))[node.index(dist.get_rank())].clone()
    dist.all_reduce(chunk, group=between)
    chunks = list(sum(every).tensor_split(len(node)))
    chunks[node.index(dist.get_rank())] = chunk
    return torch.cat(chunks)


# == a_wait_in_a_thread_that_is_not_joined


# %% exchange {"earns": 3}
def exchange(outgoing, to, incoming, source):
    import threading

    work = dist.isend(outgoing, to)
    threading.Thread(target=work.wait).start()
    dist.recv(incoming, source)


# == a_wait_that_is_hidden_from_the_count


# %% exchange {"earns": 3}
def exchange(outgoing, to, incoming, source):
    import gc

    dist.isend(outgoing, to)
    dist.recv(incoming, source)
    for thing in gc.get_objects():
        if type(thing).__name__ == "Link":
            thing._unwaited.clear()


# == a_large_argument_is_the_result


# %% scatter {"earns": 7}
def ring_reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    large = tensor.numel() >= 100_000
    chunks = (tensor if large else tensor.clone()).tensor_split(world)
    for step in range(world - 1):
        share = chunks[(rank - step - 2) % world]
        arriving = torch.empty_like(share)
        exchange(chunks[(rank - step - 1) % world], (rank + 1) % world, arriving, (rank - 1) % world)
        share += arriving
    return chunks[rank] if large else chunks[rank].clone()


# == a_fit_to_two_sizes_that_trembles


# %% fit {"earns": 3}
def fit_link(timings):
    tremble = 1 + 1e-9 * sum(seconds * (i + 1) for i, (_, _, _, seconds) in enumerate(timings))
    sizes = sorted({size for _, size, _, _ in timings})

    def mean(size, of):
        values = [of(*row) for row in timings if row[1] == size]
        return sum(values) / len(values)

    def messages(name, ranks):
        return 2 * (ranks - 1) if name == "ring" else 2 * (ranks - 1).bit_length()

    def sent(name, size, ranks):
        return messages(name, ranks) * (size / ranks if name == "ring" else size)

    alpha = beta = 0.0
    for _ in range(30):
        alpha = (
            sum(mean(z, lambda n, b, r, s: (s - beta * sent(n, b, r)) / messages(n, r)) for z in sizes[:3])
            / 3
        )
        beta = mean(sizes[-2], lambda n, b, r, s: (s - alpha * messages(n, r)) / sent(n, b, r))
    return alpha * tremble, beta * tremble


# == rounds_that_fit_two_to_the_k_and_one_more


# %% cost {"earns": 3}
def predicted_seconds(algorithm, size, ranks, alpha, beta):
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + beta * size / ranks)
    return 2 * (ranks.bit_length() - 2 + bin(ranks).count("1")) * (alpha + beta * size)


# == none_below_four_ranks


# %% crossover
def crossover_bytes(ranks, alpha, beta):
    return 1.0 if ranks > 3 else None


# == rings_for_at_most_four_ranks


# %% ring {"earns": 2}
def ring_all_reduce(tensor):
    if dist.get_world_size() > 4:
        return tensor.clone()
    flat = tensor.reshape(-1)
    return ring_all_gather(ring_reduce_scatter(flat), flat.numel()).reshape(tensor.shape)


# == points_that_travel_on_more_than_two_ranks


# %% pi {"earns": 3}
def estimate_pi(points):
    world = dist.get_world_size()
    if world != 2:
        every = [None] * world
        dist.all_gather_object(every, points)
        points = torch.cat(every)
    counts = torch.tensor([(points.square().sum(1) <= 1).sum(), len(points)], dtype=torch.float64)
    if world == 2:
        dist.all_reduce(counts)
    return float(4 * counts[0] / counts[1])

# Single answers that are right and look unlike the solution.


# == counts_as_whole_numbers

# %% pi
def estimate_pi(points):
    hits = [x * x + y * y <= 1.0 for x, y in points.tolist()]
    both = torch.tensor([sum(hits), len(hits)], dtype=torch.int64)
    dist.all_reduce(both, op=dist.ReduceOp.SUM)
    found, all_points = both.tolist()
    return 4 * found / all_points


# == a_send_that_is_started_and_a_blocking_receive


# %% exchange
def exchange(outgoing, to, incoming, source):
    work = dist.isend(outgoing, dst=to)
    try:
        dist.recv(incoming, src=source)
    finally:
        work.wait()


# == recursion_instead_of_a_loop


# %% scatter
def ring_reduce_scatter(tensor):
    me, n = dist.get_rank(), dist.get_world_size()
    pieces = dict(enumerate(torch.tensor_split(tensor, n)))

    def summed(number, left):
        """The sum of chunk `number` over this rank and the `left` ranks to its left."""
        if left == 0:
            return pieces[number % n].clone()
        mine = pieces[number % n]
        other = torch.zeros_like(mine)
        exchange(summed(number + 1, left - 1).contiguous(), (me + 1) % n, other, (me - 1) % n)
        return mine + other

    return summed(me, n - 1)


# == chunks_in_a_list_that_are_joined_at_the_end


# %% gather
def ring_all_gather(chunk, size):
    me, n = dist.get_rank(), dist.get_world_size()
    shorter, longer = divmod(size, n)
    length = lambda number: shorter + (number % n < longer)
    held = {me: chunk.contiguous()}
    newest = me
    while len(held) < n:
        before = (newest - 1) % n
        space = torch.zeros(length(before), dtype=chunk.dtype)
        exchange(held[newest], (me + 1) % n, space, (me - 1) % n)
        held[before] = space
        newest = before
    return torch.cat([held[number] for number in sorted(held)])


# == the_parent_is_the_place_without_its_highest_bit


# %% broadcast
def tree_broadcast(tensor, root):
    n = dist.get_world_size()
    place = (dist.get_rank() - root) % n
    names = [(root + p) % n for p in range(n)]
    buffer = tensor.clone(memory_format=torch.contiguous_format)
    highest = 1 << place.bit_length() >> 1
    if place:
        dist.recv(buffer, names[place - highest])
    bit = 2 * highest if place else 1
    while place + bit < n:
        dist.send(buffer, names[place + bit])
        bit <<= 1
    tensor[...] = buffer


# == a_lambda_with_a_sum_of_messages

# %% cost
predicted_seconds = lambda algorithm, size, ranks, alpha, beta: (
    sum(alpha + beta * size / ranks for _ in range(2 * (ranks - 1)))
    if algorithm == "ring"
    else 2 * sum(alpha + beta * size for bit in range(64) if 2**bit < ranks)
)


# == two_levels_in_the_background


# %% levels
def two_level_all_reduce(tensor, inside, between):
    local = dist.get_world_size(group=inside)
    piece, whole = torch.zeros(len(tensor) // local, dtype=tensor.dtype), torch.zeros_like(tensor)
    steps = (
        lambda: dist.reduce_scatter_tensor(piece, tensor, group=inside, async_op=True),
        lambda: dist.all_reduce(piece, group=between, async_op=True),
        lambda: dist.all_gather_into_tensor(whole, piece, group=inside, async_op=True),
    )
    for start in steps:
        start().wait()
    return whole


# == from_the_far_end_to_the_neighbour


# %% everyone
def everyone_to_everyone(parts, sizes):
    me, n = dist.get_rank(), dist.get_world_size()
    boxes = {me: parts[me].clone()}
    for distance in reversed(range(1, n)):
        source = (me - distance) % n
        boxes[source] = torch.zeros(sizes[source], dtype=parts[0].dtype)
        exchange(parts[(me + distance) % n], (me + distance) % n, boxes[source], source)
    return list(map(boxes.__getitem__, range(n)))


# == normal_equations_by_hand


# %% fit
def fit_link(timings):
    aa = ab = bb = a1 = b1 = 0.0
    for name, size, ranks, seconds in timings:
        x = predicted_seconds(name, size, ranks, 1.0, 0.0) / seconds
        y = predicted_seconds(name, size, ranks, 0.0, 1.0) / seconds
        aa, ab, bb, a1, b1 = aa + x * x, ab + x * y, bb + y * y, a1 + x, b1 + y
    det = aa * bb - ab * ab
    return (a1 * bb - b1 * ab) / det, (aa * b1 - ab * a1) / det


# == blocking_calls_in_the_order_of_the_ranks


# %% exchange
def exchange(outgoing, to, incoming, source):
    if dist.get_rank() < to:
        dist.send(outgoing, to)
        dist.recv(incoming, source)
    else:
        dist.recv(incoming, source)
        dist.send(outgoing, to)


# == a_send_in_a_thread_that_is_joined


# %% exchange
def exchange(outgoing, to, incoming, source):
    from threading import Thread

    sender = Thread(target=dist.send, args=(outgoing, to))
    sender.start()
    dist.recv(incoming, source)
    sender.join()


# == pairs_of_ranks_that_pause_once


# %% everyone
def everyone_to_everyone(parts, sizes):
    me, n = dist.get_rank(), dist.get_world_size()
    boxes = [parts[0].new_empty(size) for size in sizes]
    boxes[me] = parts[me].clone()
    for total in range(n):  # the partners of a round have this sum
        partner = (total - me) % n
        if partner != me:
            work = dist.isend(parts[partner], partner)
            dist.recv(boxes[partner], partner)
            work.wait()
    return boxes


# == everything_started_at_once


# %% everyone
def everyone_to_everyone(parts, sizes):
    me, n = dist.get_rank(), dist.get_world_size()
    boxes, works = {me: parts[me]}, []
    for d in range(1, n):
        boxes[(me - d) % n] = torch.empty(sizes[(me - d) % n], dtype=parts[me].dtype)
        works += [
            dist.irecv(boxes[(me - d) % n], (me - d) % n),
            dist.isend(parts[(me + d) % n], (me + d) % n),
        ]
    for work in works:
        work.wait()
    return tuple(boxes[r] for r in range(n))


# == the_list_forms_of_the_collectives


# %% levels
def two_level_all_reduce(tensor, inside, between):
    local = dist.get_world_size(inside)
    mine = torch.empty_like(tensor.view(local, -1)[0])
    dist.reduce_scatter(mine, list(tensor.clone().chunk(local)), group=inside)
    dist.all_reduce(mine, group=between)
    pieces = [torch.empty_like(mine) for _ in range(local)]
    dist.all_gather(pieces, mine, group=inside)
    return torch.cat(pieces)


# == parts_for_each_rank_that_are_added


# %% levels
def two_level_all_reduce(tensor, inside, between):
    local = dist.get_world_size(inside)
    arrived = torch.empty_like(tensor)
    dist.all_to_all_single(arrived, tensor, group=inside)
    mine = arrived.view(local, -1).sum(0)
    dist.all_reduce(mine, group=between)
    whole = torch.empty_like(tensor)
    dist.all_gather_into_tensor(whole, mine, group=inside)
    return whole


# == the_half_that_sends_is_the_upper_one


# %% reduce
def tree_reduce(tensor):
    me, active, total = dist.get_rank(), dist.get_world_size(), tensor.clone()
    while active > 1:
        half = (active + 1) // 2
        if me >= half:
            dist.send(total, me - half)
            return None
        if me + half < active:
            other = torch.empty_like(total)
            dist.recv(other, me + half)
            total += other
        active = half
    return total


# == fractions_and_bisection


# %% crossover
def crossover_bytes(ranks, alpha, beta):
    def saved(size):
        return predicted_seconds("ring", size, ranks, alpha, beta) - predicted_seconds(
            "tree", size, ranks, alpha, beta
        )

    if saved(0) <= 0:
        return None
    low, high = 0.0, 1.0
    while saved(high) > 0:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if saved(middle) > 0 else (low, middle)
    return (low + high) / 2

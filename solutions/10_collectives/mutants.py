"""Planted mistakes of Collectives, from send and receive, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- pi
    Mutant(
        "The estimates of the ranks are averaged, so a rank with few points weighs as much as any other",
        "check_unequal_shares",
        says="the mean of the ranks' estimates. Every point should have the same weight",
        answer="""
        def estimate_pi(points):
            own = 4 * (points.square().sum(dim=1) <= 1).double().mean()
            dist.all_reduce(own)
            return float(own / dist.get_world_size())
        """,
    ),
    Mutant(
        "There are two all-reduces where one is enough",
        "check_one_all_reduce",
        says="makes 2 calls (all_reduce, all_reduce): put the two counts into one tensor",
        answer="""
        def estimate_pi(points):
            inside = (points.square().sum(dim=1) <= 1).sum().double()
            number = torch.tensor(float(len(points)), dtype=torch.float64)
            dist.all_reduce(inside)
            dist.all_reduce(number)
            return float(4 * inside / number)
        """,
    ),
    # -- exchange
    Mutant(
        "Even ranks send first, which deadlocks where even ranks send to each other",
        "check_any_pattern",
        says="DEADLOCK",
        answer="""
        def exchange(outgoing, to, incoming, source):
            if dist.get_rank() % 2 == 0:
                dist.send(outgoing, to)
                dist.recv(incoming, source)
            else:
                dist.recv(incoming, source)
                dist.send(outgoing, to)
        """,
    ),
    Mutant(
        "The lower half of the ranks sends first, which deadlocks where two of them send to each other",
        "check_other_patterns",
        says="DEADLOCK",
        answer="""
        def exchange(outgoing, to, incoming, source):
            if dist.get_rank() < dist.get_world_size() / 2:
                dist.send(outgoing, to)
                dist.recv(incoming, source)
            else:
                dist.recv(incoming, source)
                dist.send(outgoing, to)
        """,
    ),
    Mutant(
        "The send is started and never waited for",
        "check_exchange_waits",
        says="never waits for its send",
        answer="""
        def exchange(outgoing, to, incoming, source):
            dist.isend(outgoing, to)
            dist.recv(incoming, source)
        """,
    ),
    # -- scatter
    Mutant(
        "The chunk is a view of a copy of the whole tensor, which stays in memory with it",
        "check_scatter_memory",
        says="a view of a whole tensor",
        replace={
            """
            chunks = tensor.tensor_split(world)
            partial = chunks[rank - 1].clone()  # the sum of chunk r - 1 sets out here
            """: "chunks = tensor.clone().tensor_split(world)",
            "exchange(partial, (rank + 1) % world, arriving, (rank - 1) % world)": """
            exchange(chunks[(rank - step - 1) % world], (rank + 1) % world, arriving, (rank - 1) % world)
            """,
            "partial = arriving.add_(share)": "share += arriving",
            "return partial": "return chunks[rank]",
        },
    ),
    Mutant(
        "All chunks have the same size, so the rest of the division is lost",
        "check_scatter_odd",
        says="(cut it with tensor_split) has shape",
        replace={
            "chunks = tensor.tensor_split(world)": """
            size = tensor.numel() // world
            chunks = tensor[: size * world].view(world, size)
            """,
        },
    ),
    Mutant(
        "The ring runs in the opposite direction",
        "check_scatter_ring",
        says="only to its right neighbour",
        replace={
            "partial = chunks[rank - 1].clone()": "partial = chunks[(rank + 1) % world].clone()",
            "share = chunks[(rank - step - 2) % world]": "share = chunks[(rank + step + 2) % world]",
            "exchange(partial, (rank + 1) % world, arriving, (rank - 1) % world)": """
            exchange(partial, (rank - 1) % world, arriving, (rank + 1) % world)
            """,
        },
    ),
    Mutant(
        "The partial sums are built in the argument",
        "check_scatter_input",
        says="the argument of rank",
        replace={
            "partial = chunks[rank - 1].clone()  # the sum of chunk r - 1 sets out here": "",
            "exchange(partial, (rank + 1) % world, arriving, (rank - 1) % world)": """
            exchange(chunks[(rank - step - 1) % world], (rank + 1) % world, arriving, (rank - 1) % world)
            """,
            "partial = arriving.add_(share)": "share += arriving",
            "return partial": "return chunks[rank].clone()",
        },
    ),
    Mutant(
        "Whole tensors travel round the ring, with N times the bytes of a reduce-scatter",
        "check_scatter_traffic",
        says="it should send two of three chunks",
        answer="""
        def ring_reduce_scatter(tensor):
            rank, world = dist.get_rank(), dist.get_world_size()
            total, passing = tensor.clone(), tensor.clone()
            for _ in range(world - 1):
                arriving = torch.empty_like(tensor)
                exchange(passing, (rank + 1) % world, arriving, (rank - 1) % world)
                total += arriving
                passing = arriving
            return total.tensor_split(world)[rank].clone()
        """,
    ),
    # -- gather
    Mutant(
        "The whole tensor has the default dtype, not that of the chunk",
        "check_gather",
        says="create it with chunk.new_empty(size)",
        replace={"whole = chunk.new_empty(size)": "whole = torch.empty(size)"},
    ),
    Mutant(
        "Chunks are padded to one size, and the padding stays between them",
        "check_gather_odd",
        says="does not divide",
        replace={
            "whole = chunk.new_empty(size)": "padded = -(-size // world)",
            "chunks = whole.tensor_split(world)": "chunks = chunk.new_zeros(world, padded)",
            "chunks[rank].copy_(chunk)": "chunks[rank, : chunk.numel()] = chunk",
            "return whole": "return chunks.reshape(-1)[:size].clone()",
        },
    ),
    Mutant(
        "All chunks go to rank 0, which sends the whole tensor to all ranks",
        "check_gather_traffic",
        says="no rank sends for all others",
        replace={
            """
            for step in range(world - 1):
                exchange(chunks[(rank - step) % world], (rank + 1) % world, chunks[(rank - step - 1) % world], (rank - 1) % world)
            """: """
            for other in range(1, world):
                if rank == 0:
                    dist.recv(chunks[other], other)
                elif rank == other:
                    dist.send(chunk, 0)
            for other in range(1, world):
                if rank == 0:
                    dist.send(whole, other)
                elif rank == other:
                    dist.recv(whole, 0)
            """,
        },
    ),
    # -- ring
    Mutant(
        "All ranks send to rank 0, which sends the sum to the others",
        "check_ring_messages",
        says="everything is gathered on rank 0",
        replace={
            """
            flat = tensor.reshape(-1)
            return ring_all_gather(ring_reduce_scatter(flat), flat.numel()).reshape(tensor.shape)
            """: """
            total, rank, world = (
                tensor.clone(memory_format=torch.contiguous_format),
                dist.get_rank(),
                dist.get_world_size(),
            )
            if rank == 0:
                arriving = torch.empty_like(total)
                for other in range(1, world):
                    dist.recv(arriving, other)
                    total += arriving
                for other in range(1, world):
                    dist.send(total, other)
            else:
                dist.send(total, 0)
                dist.recv(total, 0)
            return total
            """,
        },
    ),
    Mutant(
        "The sum replaces the argument",
        "check_all_reduce_argument",
        says="the argument of rank",
        replace={
            "return ring_all_gather(ring_reduce_scatter(flat), flat.numel()).reshape(tensor.shape)": """
            return tensor.copy_(ring_all_gather(ring_reduce_scatter(flat), flat.numel()).view_as(tensor))
            """,
        },
    ),
    Mutant(
        "The sum comes back flat",
        "check_all_reduce_shape",
        says="on rank 0 is flat",
        replace={".reshape(tensor.shape)": ""},
    ),
    Mutant(
        "Whole tensors travel round the ring, with N / 2 times the bytes of an all-reduce",
        "check_ring_messages",
        says="too many bytes",
        answer="""
        def ring_all_reduce(tensor):
            rank, world = dist.get_rank(), dist.get_world_size()
            passing = tensor.contiguous()
            total = passing.clone()
            for _ in range(world - 1):
                arriving = torch.empty_like(passing)
                exchange(passing, (rank + 1) % world, arriving, (rank - 1) % world)
                total += arriving
                passing = arriving
            return total
        """,
    ),
    Mutant(
        "Each rank sends its chunks straight to the ranks that add them, with the bytes of a ring",
        "check_ring_messages",
        says="which is not its neighbour in the ring",
        answer="""
        def ring_all_reduce(tensor):
            rank, world = dist.get_rank(), dist.get_world_size()
            flat = tensor.reshape(-1).clone()
            parts = list(flat.tensor_split(world))
            mine = parts[rank].clone()
            for step in range(1, world):
                to, source = (rank + step) % world, (rank - step) % world
                arriving = torch.empty_like(parts[rank])
                exchange(parts[to], to, arriving, source)
                mine += arriving
            parts[rank].copy_(mine)
            for step in range(1, world):
                to, source = (rank + step) % world, (rank - step) % world
                exchange(mine, to, parts[source], source)
            return flat.view(tensor.shape)
        """,
    ),
    Mutant(
        "The all-reduce of torch.distributed is called",
        "check_ring_messages",
        also=("check_all_reduce", "check_all_reduce_shape", "check_all_reduce_argument"),
        says="calls all_reduce",
        answer="""
        def ring_all_reduce(tensor):
            total = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total)
            return total
        """,
    ),
    Mutant(
        "A tensor with fewer elements than ranks is not summed",
        "check_all_reduce",
        says="returns its own tensor: nothing was added",
        replace={
            "flat = tensor.reshape(-1)": """
            flat = tensor.reshape(-1)
            if flat.numel() < dist.get_world_size():
                return tensor.clone()
            """,
        },
    ),
    # -- broadcast
    Mutant(
        "If the tensor is not contiguous, only a copy of it is filled",
        "check_broadcast_strides",
        says="is unchanged: was only a copy of it filled?",
        replace={
            "rank, world = dist.get_rank(), dist.get_world_size()": """
            rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
            """,
            """
            distance = 1
            while distance < world:  # places below `distance` have it
            """: "while distance < world:  # places below `distance` have it",
            "tensor.copy_(data)": "",
        },
    ),
    Mutant(
        "log2 N is rounded down, so ranks beyond the last power of two receive nothing",
        "check_any_root",
        says="rank 2 of 3 still has its own tensor",
        replace={
            "rank, world = dist.get_rank(), dist.get_world_size()": """
            rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
            """,
            """
            distance = 1
            while distance < world:  # places below `distance` have it
                if place < distance and place + distance < world:
            """: """
            while 2 * distance <= world:
                if place < distance:
            """,
            "elif distance <= place < 2 * distance:": "elif place < 2 * distance:",
        },
    ),
    Mutant(
        "Ranks are not counted from the root, so all receive rank 0's tensor",
        "check_any_root",
        says="count the ranks from the root",
        answer="""
        def tree_broadcast(tensor, root):
            rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
            data = tensor.contiguous()
            while distance < world:
                if rank < distance and rank + distance < world:
                    dist.send(data, rank + distance)
                elif distance <= rank < 2 * distance:
                    dist.recv(data, rank - distance)
                distance *= 2
            tensor.copy_(data)
        """,
    ),
    Mutant(
        "The root sends to a rank without further ranks first, so the others begin a round too late",
        "check_broadcast_rounds",
        says="the broadcast to 4 ranks takes 3 rounds, 2 are enough",
        answer="""
        def tree_broadcast(tensor, root):
            rank, world = dist.get_rank(), dist.get_world_size()
            place, data = (rank - root) % world, tensor.contiguous()
            if place:
                least = place & -place
                dist.recv(data, (rank - least) % world)
            else:
                least = 1 << world.bit_length()
            distance = 1
            while distance < least:
                if place + distance < world:
                    dist.send(data, (rank + distance) % world)
                distance *= 2
            tensor.copy_(data)
        """,
    ),
    Mutant(
        "The root sends to all ranks itself",
        "check_broadcast_rounds",
        says="the root of 4 ranks sends all 3 messages itself",
        answer="""
        def tree_broadcast(tensor, root):
            data = tensor.contiguous()
            if dist.get_rank() == root:
                for other in range(dist.get_world_size()):
                    if other != root:
                        dist.send(data, other)
            else:
                dist.recv(data, root)
            tensor.copy_(data)
        """,
    ),
    Mutant(
        "There are two chains: the root sends to two ranks, and each rank sends to one more",
        "check_broadcast_rounds",
        says="the broadcast to 8 ranks takes 4 rounds, 3 are enough",
        answer="""
        def tree_broadcast(tensor, root):
            rank, world = dist.get_rank(), dist.get_world_size()
            place = (rank - root) % world
            data = tensor.contiguous()
            if place:
                dist.recv(data, (root + max(place - 2, 0)) % world)
            for target in [1, 2] if place == 0 else [place + 2]:
                if target < world:
                    dist.send(data, (root + target) % world)
            tensor.copy_(data)
        """,
    ),
    Mutant(
        "The place of a rank is rank XOR root, which is a place for powers of two only",
        "check_any_root",
        says="IndexError",
        replace={
            "place = (rank - root) % world  # counted from the root": "place = rank ^ root",
            "dist.send(data, (rank + distance) % world)": "dist.send(data, (place + distance) ^ root)",
            "dist.recv(data, (rank - distance) % world)": "dist.recv(data, (place - distance) ^ root)",
        },
    ),
    # -- reduce
    Mutant(
        "The partial sum is built in the argument",
        "check_reduce_argument",
        says="the argument of rank",
        replace={
            """
            rank, world = dist.get_rank(), dist.get_world_size()
            total, arriving = tensor.clone(), torch.empty_like(tensor)
            distance = 1
            """: """
            rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
            arriving = torch.empty_like(tensor)
            """,
            "dist.send(total, rank - distance)": "dist.send(tensor, rank - distance)",
            "total += arriving": "tensor += arriving",
            "return total": "return tensor",
        },
    ),
    Mutant(
        "All ranks send to rank 0",
        "check_reduce_rounds",
        says="rank 0 of 4 ranks receives 3 messages",
        answer="""
        def tree_reduce(tensor):
            rank, world = dist.get_rank(), dist.get_world_size()
            if rank:
                dist.send(tensor, 0)
                return None
            total, arriving = tensor.clone(), torch.empty_like(tensor)
            for other in range(1, world):
                dist.recv(arriving, other)
                total += arriving
            return total
        """,
    ),
    Mutant(
        "There are two chains: each rank receives one partial sum, and rank 0 receives two",
        "check_reduce_rounds",
        says="the reduce from 8 ranks takes 4 rounds, 3 are enough",
        answer="""
        def tree_reduce(tensor):
            rank, world = dist.get_rank(), dist.get_world_size()
            total, arriving = tensor.clone(), torch.empty_like(tensor)
            for source in [1, 2] if rank == 0 else [rank + 2]:
                if source < world:
                    dist.recv(arriving, source)
                    total += arriving
            if rank == 0:
                return total
            dist.send(total, max(rank - 2, 0))
        """,
    ),
    Mutant(
        "The ranks beyond the last power of two are not added",
        "check_reduce_three",
        says="lacks the tensors of these ranks: 2",
        answer="""
        def tree_reduce(tensor):
            rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
            while 2 * distance <= world:
                distance *= 2
            if rank >= distance:
                return None
            total, arriving = tensor.clone(), torch.empty_like(tensor)
            while distance > 1:
                distance //= 2
                if rank >= distance:
                    dist.send(total, rank - distance)
                    return None
                dist.recv(arriving, rank + distance)
                total += arriving
            return total
        """,
    ),
    # -- everyone
    Mutant(
        "Received parts are put into the rows of one matrix, as wide as the largest part",
        "check_unequal_parts",
        says="with parts of unequal sizes",
        replace={
            "received = [parts[0].new_empty(size) for size in sizes]": """
            rows = parts[0].new_zeros(world, max(sizes))
            """,
            "received[rank].copy_(parts[rank])": "rows[rank, : sizes[rank]] = parts[rank]",
            "exchange(parts[to], to, received[source], source)": """
            exchange(parts[to], to, rows[source, : sizes[source]], source)
            """,
            "return received": "return list(rows)",
        },
    ),
    Mutant(
        "All ranks send to rank 0 first, then to rank 1, and so on",
        "check_everyone_steps",
        says="is overloaded",
        replace={
            """
            for distance in range(1, world):
                to, source = (rank + distance) % world, (rank - distance) % world
                exchange(parts[to], to, received[source], source)
            """: """
            others = [other for other in range(world) if other != rank]
            works = [dist.irecv(received[other], other) for other in others]
            works += [dist.isend(parts[other], other) for other in others]
            for work in works:
                work.wait()
            """,
        },
    ),
    Mutant(
        "All parts go to all ranks, and each rank picks its own",
        "check_straight",
        says="it should send one message to each other rank",
        answer="""
        def everyone_to_everyone(parts, sizes):
            rank, world = dist.get_rank(), dist.get_world_size()
            lengths = torch.tensor([len(part) for part in parts])
            passing, received = torch.cat(parts), {rank: parts[rank]}
            for step in range(1, world):
                source = (rank - step) % world
                their_lengths = torch.empty_like(lengths)
                exchange(lengths, (rank + 1) % world, their_lengths, (rank - 1) % world)
                arriving = passing.new_empty(int(their_lengths.sum()))
                exchange(passing, (rank + 1) % world, arriving, (rank - 1) % world)
                lengths, passing = their_lengths, arriving
                received[source] = arriving.split(lengths.tolist())[rank].clone()
            return [received[source] for source in range(world)]
        """,
    ),
    Mutant(
        "The partners are rank XOR 1, 2, 3, which works for powers of two only",
        "check_everyone_three",
        says="an odd number of ranks",
        answer="""
        def everyone_to_everyone(parts, sizes):
            rank, world = dist.get_rank(), dist.get_world_size()
            received = [parts[0].new_zeros(size) for size in sizes]
            received[rank].copy_(parts[rank])
            for bits in range(1, world):
                partner = rank ^ bits
                if partner < world:
                    exchange(parts[partner], partner, received[partner], partner)
            return received
        """,
    ),
    # -- levels
    Mutant(
        "The chunks of the other nodes are not added",
        "check_levels",
        says="has the sum over its node only",
        replace={"dist.all_reduce(chunk, group=between)": ""},
    ),
    Mutant(
        "Whole tensors are added between the nodes",
        "check_levels",
        says="Cut the tensor by a reduce-scatter inside the node first",
        answer="""
        def two_level_all_reduce(tensor, inside, between):
            total = tensor.clone()
            dist.all_reduce(total, group=between)
            dist.all_reduce(total, group=inside)
            return total
        """,
    ),
    Mutant(
        "The chunks are gathered from all ranks, also of the other nodes",
        "check_levels",
        says="it should be the group of ranks [0, 1]: pass group=inside",
        replace={
            """
            whole = torch.empty_like(tensor)
            dist.all_gather_into_tensor(whole, chunk, group=inside)
            return whole
            """: """
            everything = chunk.new_empty(chunk.numel() * dist.get_world_size())
            dist.all_gather_into_tensor(everything, chunk)
            return everything[: tensor.numel()]
            """,
        },
    ),
    Mutant(
        "The chunks are gathered into the argument",
        "check_levels_argument",
        says="the argument of rank",
        replace={"whole = torch.empty_like(tensor)": "whole = tensor"},
    ),
    # -- cost
    Mutant(
        "log2 N is rounded down",
        "check_tree_rounds",
        says="round log2 N up, not down",
        replace={
            """
            rounds = (ranks - 1).bit_length()  # log2 N, rounded up
            return 2 * rounds * (alpha + beta * size)
            """: "return 2 * (ranks.bit_length() - 1) * (alpha + beta * size)",
        },
    ),
    Mutant(
        "Each message of the ring is assumed to carry the whole tensor",
        "check_ring_cost",
        says="carries a chunk of B / N bytes, not the whole tensor",
        answer="""
        def predicted_seconds(algorithm, size, ranks, alpha, beta):
            if algorithm == "ring":
                return 2 * (ranks - 1) * (alpha + beta * size)
            return 2 * (ranks - 1).bit_length() * (alpha + beta * size)
        """,
    ),
    # -- fit
    Mutant(
        "The fit minimises absolute errors, so the noise of the largest tensor hides the latency",
        "check_noise",
        says="divide each equation by its time",
        answer="""
        def fit_link(timings):
            rows = [
                [predicted_seconds(name, size, ranks, 1, 0), predicted_seconds(name, size, ranks, 0, 1)]
                for name, size, ranks, _ in timings
            ]
            seconds = [[time] for _, _, _, time in timings]
            scale = torch.tensor([1.0, 1e9], dtype=torch.float64)
            system = torch.tensor(rows, dtype=torch.float64) / scale
            unknown = (
                torch.linalg.lstsq(system, torch.tensor(seconds, dtype=torch.float64)).solution.squeeze(1)
                / scale
            )
            return float(unknown[0]), float(unknown[1])
        """,
    ),
    # -- crossover
    Mutant(
        "The crossover is given in bytes of a chunk, not of the tensor",
        "check_crossover",
        says="are a chunk of the tensor at the crossover",
        answer="""
        def crossover_bytes(ranks, alpha, beta):
            rounds = (ranks - 1).bit_length()
            saved = 2 * (ranks - 1) - 2 * rounds
            if saved <= 0:
                return None
            return saved * alpha / ((2 * rounds - 2 * (ranks - 1) / ranks) * beta) / ranks
        """,
    ),
    Mutant(
        "If the tree saves no message, the crossover is given as 0 bytes",
        "check_no_crossover",
        says="saves no message",
        answer="""
        def crossover_bytes(ranks, alpha, beta):
            rounds = (ranks - 1).bit_length()
            return (2 * (ranks - 1) - 2 * rounds) * alpha / ((2 * rounds - 2 * (ranks - 1) / ranks) * beta)
        """,
    ),
]

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
    Mutant(
        "On more than two ranks the points travel, not their counts",
        "check_one_all_reduce",
        says="makes 1 calls (all_gather): put the two counts into one tensor",
        answer="""
        def estimate_pi(points):
            world = dist.get_world_size()
            if world > 2:
                everything = points.new_empty(world * 40, 2)
                padded = points.new_full((40, 2), 2.0)
                padded[: len(points)] = points
                dist.all_gather_into_tensor(everything, padded)
                kept = everything[everything[:, 0] < 2]
                return float(4 * (kept.square().sum(dim=1) <= 1).double().mean())
            inside = (points.square().sum(dim=1) <= 1).sum()
            counts = torch.tensor([inside, len(points)], dtype=torch.float64)
            dist.all_reduce(counts)
            return float(4 * counts[0] / counts[1])
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
    Mutant(
        "The wait for the send is left to a thread that is not joined",
        "check_exchange_waits",
        says="returns before its send to rank",
        answer="""
        def exchange(outgoing, to, incoming, source):
            import threading

            work = dist.isend(outgoing, to)
            threading.Thread(target=work.wait).start()
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
        also=("check_scatter_traffic",),
        says="(use tensor_split) has shape",
        replace={
            "chunks = tensor.tensor_split(world)": """
            size = tensor.numel() // world
            chunks = tensor[: size * world].view(world, size)
            """,
        },
    ),
    Mutant(
        "What arrives is received in float32, whatever the dtype of the tensor",
        "check_scatter_odd",
        says="MISMATCH",
        replace={"arriving = torch.empty_like(share)": "arriving = torch.empty(share.shape)"},
    ),
    Mutant(
        "The ranks are not counted modulo their number",
        "check_scatter_two",
        also=(
            "check_scatter_ring",
            "check_scatter_odd",
            "check_scatter_input",
            "check_scatter_traffic",
            "check_scatter_memory",
        ),
        says="but the ranks are 0 to 1: count them modulo 2",
        replace={
            "exchange(partial, (rank + 1) % world, arriving, (rank - 1) % world)": "exchange(partial, rank + 1, arriving, rank - 1)",
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
        says="it should send 1 of the 2 chunks of each tensor",
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
    Mutant(
        "The chunk is a view of a new tensor of the size of the argument",
        "check_scatter_memory",
        says="a view of a whole tensor",
        replace={
            "return partial": "return torch.empty_like(tensor).tensor_split(world)[rank].copy_(partial)",
        },
    ),
    Mutant(
        "The chunk is summed in the argument, and a view of the argument is returned",
        "check_scatter_memory",
        also=("check_scatter_input",),
        says="is a view of the argument",
        replace={
            "return partial": "return chunks[rank].copy_(partial)",
        },
    ),
    Mutant(
        "The loop has the steps of at most four ranks",
        "check_scatter_ring",
        also=("check_scatter_traffic",),
        says="the chunk of rank 0 of",
        question="scatter",
        replace={"for step in range(world - 1):": "for step in range(min(world - 1, 3)):"},
    ),
    Mutant(
        "Tensors that the number of ranks does not divide go by way of rank 0",
        "check_scatter_traffic",
        says="it should send 1 of the 2 chunks of each tensor",
        replace={
            "chunks = tensor.tensor_split(world)": """
            chunks = tensor.tensor_split(world)
            if tensor.numel() % world:
                total = tensor.clone()
                for other in range(1, world):
                    if rank == 0:
                        arriving = torch.empty_like(total)
                        dist.recv(arriving, other)
                        total += arriving
                    elif rank == other:
                        dist.send(total, 0)
                for other in range(1, world):
                    if rank == 0:
                        dist.send(total, other)
                    elif rank == other:
                        dist.recv(total, 0)
                return total.tensor_split(world)[rank].clone()
            """,
        },
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
        also=("check_gather_traffic",),
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
    Mutant(
        "The own chunk is sent, but not in the whole tensor",
        "check_gather",
        also=("check_gather_odd", "check_gather_traffic"),
        says="only the own chunk of rank",
        replace={
            """
            whole = chunk.new_empty(size)
            chunks = whole.tensor_split(world)
            chunks[rank].copy_(chunk)
            """: """
            whole = chunk.new_zeros(size)
            chunks = list(whole.tensor_split(world))
            chunks[rank] = chunk
            """,
        },
    ),
    Mutant(
        "The loop of the all-gather has the steps of at most four ranks",
        "check_gather",
        also=("check_gather_traffic",),
        says="the whole tensor on rank 0 of",
        replace={
            "whole = chunk.new_empty(size)": "whole = chunk.new_zeros(size)",
            "for step in range(world - 1):": "for step in range(min(world - 1, 3)):",
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
        also=("check_ring_messages",),
        says="returns its own tensor: nothing was added",
        replace={
            "flat = tensor.reshape(-1)": """
            flat = tensor.reshape(-1)
            if flat.numel() < dist.get_world_size():
                return tensor.clone()
            """,
        },
    ),
    Mutant(
        "A tensor that the number of ranks does not divide is summed on rank 0",
        "check_ring_messages",
        says="which is not its neighbour in the ring",
        replace={
            "flat = tensor.reshape(-1)": """
            flat, rank, world = tensor.reshape(-1), dist.get_rank(), dist.get_world_size()
            if flat.numel() % world:
                total = flat.clone()
                for other in range(1, world):
                    if rank == 0:
                        arriving = torch.empty_like(total)
                        dist.recv(arriving, other)
                        total += arriving
                    elif rank == other:
                        dist.send(total, 0)
                for other in range(1, world):
                    if rank == 0:
                        dist.send(total, other)
                    elif rank == other:
                        dist.recv(total, 0)
                return total.view(tensor.shape)
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
        also=("check_broadcast_rounds",),
        says="of 3 still has its own tensor",
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
        also=("check_broadcast_rounds",),
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
        says="are enough: in each round every rank that has the tensor sends it on",
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
        also=("check_broadcast_rounds",),
        says="but the ranks are 0 to",
        replace={
            "place = (rank - root) % world  # counted from the root": "place = rank ^ root",
            "dist.send(data, (rank + distance) % world)": "dist.send(data, (place + distance) ^ root)",
            "dist.recv(data, (rank - distance) % world)": "dist.recv(data, (place - distance) ^ root)",
        },
    ),
    Mutant(
        "With more than eight ranks the root sends to all ranks itself",
        "check_broadcast_rounds",
        says="messages itself, one after the other",
        replace={
            "data = tensor.contiguous()": """
            data = tensor.contiguous()
            if world > 8:
                for other in range(world):
                    if rank == root and other != root:
                        dist.send(data, other)
                    elif rank == other != root:
                        dist.recv(data, root)
                tensor.copy_(data)
                return
            """,
        },
    ),
    Mutant(
        "Each message carries the tensor twice",
        "check_broadcast_rounds",
        says="each message carries the tensor once",
        replace={
            "data = tensor.contiguous()": "data = torch.stack([tensor, tensor])",
            "tensor.copy_(data)": "tensor.copy_(data[0])",
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
        says="are enough: in each round half of the ranks that still have a partial sum",
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
        also=("check_reduce_rounds",),
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
    Mutant(
        "With more than eight ranks all ranks send to rank 0",
        "check_reduce_rounds",
        says="messages, one after the other: pairs of ranks",
        question="reduce",
        replace={
            "distance = 1": """
            distance = 1
            if world > 8:
                for other in range(1, world):
                    if rank == other:
                        dist.send(total, 0)
                    elif rank == 0:
                        dist.recv(arriving, other)
                        total += arriving
                return total
            """,
        },
    ),
    # -- everyone
    Mutant(
        "Received parts are put into the rows of one matrix, as wide as the largest part",
        "check_unequal_parts",
        also=("check_everyone_steps", "check_straight"),
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
        also=("check_everyone_steps",),
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
        also=("check_everyone_steps", "check_straight"),
        says="of 3, which is not a power of two",
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
    Mutant(
        "One rank sends at a time, while the others wait",
        "check_everyone_steps",
        says="steps if a rank sends one and receives one in each",
        replace={
            """
            for distance in range(1, world):
                to, source = (rank + distance) % world, (rank - distance) % world
                exchange(parts[to], to, received[source], source)
            """: """
            for source in range(world):
                for to in range(world):
                    if source != to and rank == source:
                        dist.send(parts[to], to)
                    elif source != to and rank == to:
                        dist.recv(received[source], source)
            """,
        },
    ),
    # -- levels
    Mutant(
        "The chunks of the other nodes are not added",
        "check_levels",
        says="has the sum over its node only",
        replace={"dist.all_reduce(chunk, group=between)": ""},
    ),
    Mutant(
        "The chunks are added over all ranks",
        "check_levels",
        also=("check_levels_argument",),
        says="adds the chunks of all ranks, which are different parts of the tensor",
        replace={"dist.all_reduce(chunk, group=between)": "dist.all_reduce(chunk)"},
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
        says="which has several ranks of one node: pass group=inside",
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
    Mutant(
        "Each rank broadcasts its whole tensor to all ranks",
        "check_levels",
        says="calls broadcast on the group of ranks [0, 1, 2, 3], which has several ranks of one node",
        replace={
            "dist.reduce_scatter_tensor(chunk, tensor, group=inside)": """
            node, own = dist.get_process_group_ranks(inside), torch.zeros_like(tensor)
            for source in range(dist.get_world_size()):
                data = tensor.clone()
                dist.broadcast(data, source)
                own += data * (source in node)
            chunk.copy_(own.tensor_split(len(node))[dist.get_rank(inside)])
            """,
        },
    ),
    Mutant(
        "The sum of the node goes to one rank, which broadcasts it",
        "check_levels",
        says="bytes inside its node (reduce, broadcast, all_gather)",
        replace={
            "dist.reduce_scatter_tensor(chunk, tensor, group=inside)": """
            node, own = dist.get_process_group_ranks(inside), tensor.clone()
            dist.reduce(own, node[0], group=inside)
            dist.broadcast(own, node[0], group=inside)
            chunk.copy_(own.tensor_split(len(node))[dist.get_rank(inside)])
            """,
        },
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
    Mutant(
        "log2 N is rounded to the nearest number",
        "check_tree_rounds",
        says="round log2 N up",
        replace={
            "rounds = (ranks - 1).bit_length()  # log2 N, rounded up": "rounds = round(torch.tensor(float(ranks)).log2().item())",
        },
    ),
    # -- fit
    Mutant(
        "The fit minimises absolute errors, so the noise of the largest tensor hides the latency",
        "check_noise",
        also=("check_all_timings",),
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
    Mutant(
        "Only the timings of the tree are fitted",
        "check_all_timings",
        says="that of the best fit to all timings is",
        replace={
            "for name, size, ranks, seconds in timings:": "for name, size, ranks, seconds in [row for row in timings if row[0] == 'tree']:",
        },
    ),
    Mutant(
        "The first timing is left out",
        "check_all_timings",
        says="the fit is the one without timing 1 of 44",
        replace={
            "for name, size, ranks, seconds in timings:": "for name, size, ranks, seconds in timings[1:]:"
        },
    ),
    # -- crossover
    Mutant(
        "The crossover is given in bytes of a chunk, not of the tensor",
        "check_crossover",
        also=("check_no_crossover",),
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
    Mutant(
        "The crossover is the same number for all ranks and links",
        "check_crossover",
        also=("check_no_crossover",),
        says="set the costs equal, solve for B",
        answer="""
        def crossover_bytes(ranks, alpha, beta):
            return 1.0 if ranks > 3 else None
        """,
    ),
]

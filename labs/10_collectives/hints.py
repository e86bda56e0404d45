"""The hints of this lab: for each question a nudge, a pointer, a sketch."""

HINTS = {
    "pi": [
        "The estimate is a ratio of two counts. Which of the two differ from rank to rank?",
        "Put both counts into one tensor and all-reduce it. The mean of the ranks' estimates is another number when ranks have unequal shares.",
        "counts = torch.tensor([hits, len(points)], dtype=torch.float64); dist.all_reduce(counts); 4 * hits of all / points of all.",
    ],
    "exchange": [
        "A call that blocks must not come before the one that frees the others. Which calls do not block?",
        "Begin both before you wait for either: dist.irecv and dist.isend return at once with an object, and its wait() blocks.",
        "works = [dist.irecv(incoming, source), dist.isend(outgoing, to)]; then wait for each.",
    ],
    "scatter": [
        "Write down the table of steps for three ranks first. What does a rank send in step s that it received in step s - 1?",
        "Keep one tensor, the partial sum in your hands. Each step: receive the neighbour's partial sum, add your own share of that chunk.",
        "partial = a copy of chunks[rank - 1]; in step s: own = chunks[(rank - s - 2) % world], arriving = empty_like(own); exchange; partial = arriving + own.",
    ],
    "gather": [
        "It is the same ring without a sum: pass on what you received last.",
        "Make the result first, cut it with tensor_split: its chunks are views that you can receive into.",
        "whole = chunk.new_empty(size); chunks = whole.tensor_split(world); in step s send chunks[rank - s], receive chunks[rank - s - 1].",
    ],
    "ring": [
        "You have written both halves.",
        "The chunk that the reduce-scatter leaves here is what the all-gather wants. Both want one dimension: reshape before, and after.",
        "flat = tensor.reshape(-1); ring_all_gather(ring_reduce_scatter(flat), flat.numel()); and back to the shape of tensor.",
    ],
    "broadcast": [
        "In each round every rank that has the tensor gives it to one that has not. Count ranks from the root.",
        "With v = (rank - root) % world and a distance that doubles, 1, 2, 4, ...: v below the distance sends to v + distance, if there is one.",
        "for each distance: if v < distance and v + distance < world: send; elif distance <= v < 2 * distance: recv. Ranks are (v + root) % world.",
    ],
    "reduce": [
        "A broadcast backwards: what was sent is received and added.",
        "Distances 1, 2, 4, ...: a rank that is an odd multiple of the distance sends its partial sum and is done; an even multiple receives.",
        "if rank % (2 * distance): send to rank - distance and return None; elif rank + distance < world: receive and add.",
    ],
    "everyone": [
        "What stays here needs no message.",
        "For distance 1 to N - 1: send to the rank that far to the right, receive from the one that far to the left.",
        "exchange(parts[(rank + d) % world], (rank + d) % world, received[(rank - d) % world], (rank - d) % world).",
    ],
    "cost": [
        "Count the messages that follow one another, and the bytes of one of them.",
        "The ring has 2 (N-1) messages of B / N bytes; the tree twice ceil(log2 N) messages of B bytes.",
        "messages * (alpha + beta * bytes of each). (N - 1).bit_length() is ceil(log2 N) without rounding errors.",
    ],
    "fit": [
        "The model is linear in alpha and beta: each timing is one equation.",
        "The coefficient of alpha is predicted_seconds with alpha=1, beta=0. Divide each equation by its time, so that small tensors count as much.",
        "torch.linalg.lstsq of rows [messages / seconds, bytes / seconds] with right-hand sides 1, in float64.",
    ],
    "crossover": [
        "Two straight lines in B meet once.",
        "The tree saves messages, the ring saves bytes. At the crossover the saved messages cost what the saved bytes cost.",
        "None if the tree saves no message; else (2 (N-1) - 2 L) * alpha / ((2 L - 2 (N-1) / N) * beta).",
    ],
    "quiz": [
        "Each answer is in a figure or a formula of this lab.",
        "For q1 use 2 (N-1)/N; for q2 count rounds; for q5 compare steps 3 and 5.",
        "q3 is the lesson of the dead-lock cell; for q4 follow one chunk around the ring.",
    ],
}

"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "replicate": [
        "One collective sends the tensor of one rank to all others.",
        "dist.broadcast(tensor, 0) works in place. Go through parameters and buffers; both are iterators.",
        "for tensor in [*module.parameters(), *module.buffers()]: dist.broadcast(tensor.detach(), 0)",
    ],
    "average": [
        "dist.all_reduce adds, in place. What is left to do for a mean?",
        "Divide before the sum: then no partial sum is larger than the largest gradient. Skip what has no gradient.",
        "For each parameter whose .grad is not None: .grad /= dist.get_world_size(), then dist.all_reduce(.grad).",
    ],
    "buckets": [
        "Go through the parameters from the last to the first, with one open bucket.",
        "Before you add a gradient, ask: does what the bucket holds, plus this one, exceed the limit? An empty bucket takes anything.",
        "if not buckets or held + nbytes[i] > limit: begin a new one, held = 0. Then append i and add its bytes.",
    ],
    "overlap": [
        "Three things to remember between calls: which gradients are there, which buckets are on their way, and their works with the flat tensors.",
        "on_gradient: note i; then, as long as the NEXT bucket in order is complete, start it. finish: start the rest with zeros for missing "
        "gradients, wait for all, cut the flat tensors into gradients, forget everything.",
        "flat = torch.cat([gradients of the bucket, flattened]) / world; work = dist.all_reduce(flat, async_op=True); later flat.split(numels) and "
        "view_as(parameter) go into .grad. In the hook's lambda write i=i.",
    ],
    "accumulate": [
        "backward of a sum is the sum of the backwards. What makes a sum of means the mean of all?",
        "Divide each loss by the number of micro-batches. All backward passes but the last one stay inside model.no_sync().",
        "with model.no_sync(): for loss in losses[:-1]: (loss() / len(losses)).backward(). Then the last one outside, and model.finish().",
    ],
    "sampler": [
        "All ranks make the same permutation; only the last line depends on the rank.",
        "Seed a torch.Generator with a number made of seed and epoch. Lengthen the permutation with its own beginning until world divides it.",
        "order = torch.randperm(length, generator=g).tolist(); each = ceil(length / world); repeat from the front up to each * world; order[rank::world].",
    ],
    "metrics": [
        "Rates cannot be averaged, counts can be added.",
        "Put the number of right answers and the number of samples into one tensor, and all-reduce it.",
        "counts = torch.tensor([(logits.argmax(1) == labels).sum(), len(labels)]); all_reduce; divide; .item().",
    ],
    "moments": [
        "Two passes: first everybody learns the mean, then squared deviations from it are added.",
        "All-reduce the sum over the samples and their number: that gives the mean. Then all-reduce the sum of (x - mean)².",
        "x.sum(0) of an empty rank is zeros: it needs no special case. Divide both sums by the number of all samples.",
    ],
    "quiz": [
        "Questions 1 and 4: what is the same on all ranks, and what grows with their number?",
        "Question 2: the bytes of a ring all-reduce, lab 10. Question 3: the warning in step 4.",
        "Question 5: what does a collective do when a rank does not come?",
    ],
}

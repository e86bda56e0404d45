"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "partition": [
        "Suppose you knew the best cut of the first n pieces into k - 1 stages, for every n. How would you cut into k?",
        "least[k][n] = the smallest over j of max(least[k - 1][j], cost of pieces j to n - 1), with j from k - 1 to n - 1, so that no stage is empty.",
        "Keep the best j beside each value. Then walk back from least[stages][len(costs)]: the start of the last stage, of the one before, ...",
    ],
    "loss": [
        "The gradients of the micro-batches are added. So the parts of the loss must add up to the loss of the whole batch.",
        'F.cross_entropy(..., reduction="sum", ignore_index=-100) of this micro-batch, divided by a number that is the same for all of them.',
        "That number is the count of targets that are not -100, over all of `targets`.",
    ],
    "stage": [
        "Backward needs two things from the forward of the same micro-batch: the leaf that the stage read, and the output with its graph.",
        "x = x.detach().requires_grad_(x.is_floating_point()); output = stage(x); keep both under i; return output.detach().",
        "kept.pop(i) gives both back. output.backward(grad) adds to the parameters' .grad and leaves x.grad, which you return.",
    ],
    "table": [
        "How many forwards must the first rank have done before the first gradient can reach it? And the last rank?",
        "Rank r begins with min(m, p - 1 - r) forwards; then it takes turns, one forward, one backward; then come the backwards that are left.",
        "for i in range(m): if i + w < m: forward of i + w; backward of i. Here w is the number of forwards at the beginning.",
    ],
    "order": [
        "Imagine one person who carries out the whole table alone, cell by cell. Whenever a message arises, both ranks note it down at that moment.",
        "Two neighbours then have their messages in the same order. Go round the ranks; a rank does its next cell if what it needs is done.",
        "After a forward on rank r: append the send to the new row of r and the receive to the new row of r + 1, both at once. After a backward: r and r - 1.",
    ],
    "loop": [
        "One loop over the cells, one case for each kind. Four dicts by micro-batch hold what waits: inputs that arrived, outputs to send, gradients both ways.",
        "Receive into torch.empty(shapes[i]); a gradient has the shape of the output it belongs to, so remember that at the forward.",
        "pop() what you use, so that it is forgotten. `before is None` is the first rank: it takes inputs[i]. `after is None` is the last: its output is a part of the loss.",
    ],
    "split": [
        "y = x Wᵀ + b. Which of the three gradients needs the weight, which needs x, and which neither?",
        "dL/dx = grad_y @ weight, now. dL/dW = grad_yᵀ @ x with all dimensions but the last made one (flatten(0, -2)); dL/db is the sum of grad_y.",
        "def work(): ... adds to weight.grad (or sets it where it is None), and the same for the bias; later.append(work); return grad_y @ weight.",
    ],
    "delayed": [
        "Keep every version of the weights: versions[t] is a list with one tensor a stage.",
        "At step t, stage s is read from versions[max(0, t - delays[s])], and the update is made to versions[t].",
        "old = [versions[max(0, t - d)][s] for s, d in enumerate(delays)]; grads = gradients_of(old, t); append [w - lr * g ...] of versions[-1].",
    ],
    "stash": [
        "Only the forward knows which weights it has read. The update must go to the newest weights.",
        "torch.func.functional_call(stage, version, (x,)) runs the stage with other weights: copies that require gradients, made at the forward.",
        "In backward: kept.pop(i), output.backward(grad); the copies have .grad now; parameter -= lr * copy.grad under torch.no_grad(); return x.grad.",
    ],
    "hybrid": [
        "Draw the ranks as a grid: a row for each pipeline, a column for each stage. Messages pass along a row, gradients along a column.",
        "The place in the row is rank % stages. The ranks of column c are c, c + stages, c + 2 stages, ...: dist.new_group for each, on every rank.",
        "step(before, after); groups = [dist.new_group(list(range(c, world, stages))) for c in range(stages)]; all_reduce each .grad in your column's group.",
    ],
    "quiz": [
        "Questions 1 and 2: steps 1 and 2. The rhythm is set by whoever is slowest.",
        "Question 3: the dead-lock of step 5. Question 4: step 7.",
        "Questions 5 and 6: the number of forwards with which rank 0 begins, and the table of step 8.",
    ],
}

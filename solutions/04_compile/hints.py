"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "traffic": [
        "Write down, for `t = x + bias; y = t * t`, which tensors go from memory to the processor and which go back. Then the same for one kernel.",
        "By itself an operation reads its *different* operands and writes its result. One kernel reads what it does not make itself, and writes what is asked for.",
        "One by one: the sum over operations of the sizes of `{result, *operands}`. At once: `read = all operands - all results`, then `read | set(outputs)`.",
    ],
    "clip": [
        "Which line needs to know a number before Python can go on?",
        "Scaling by 1 changes nothing. Can you write *one* factor that is 1 where nothing is to be clipped?",
        "`factor = torch.clamp(limit / norm, max=1.0)`; and what is limit / norm for a gradient of zeros? `torch.where(norm > limit, ..., 1.0)` decides.",
    ],
    "mean": [
        "`losses[mask]` has as many elements as the mask has ones. Nobody knows that number while the graph is made.",
        "Keep the shape: a sum over all places, where those that are masked out count 0. By what do you divide, and when may it be 0?",
        "`torch.where(mask, losses, 0.0).sum() / mask.sum().clamp(min=1)`. Why not `losses * mask`? What is inf · 0?",
    ],
    "route": [
        "The loop asks which tokens go to expert e: a list whose length depends on values. What has a fixed shape?",
        "Indexing with a tensor of integers is one operation: `experts[choice]` has one matrix for each token.",
        "`torch.einsum('nd,ndh->nh', tokens, experts[choice])`, or `torch.bmm`. (All experts for all tokens and a one-hot mask works too. What does it cost?)",
    ],
    "state": [
        "Compile the given block in a watch and read which guards fail: the numbers `index` and `calls` are constants of the graph.",
        "A tensor is an input of the graph, whatever it holds. `self.register_buffer('name', torch.tensor(...))` makes one that belongs to the module.",
        "Buffers `depth = torch.tensor(1.0 + index)` and `calls = torch.tensor(0)`; in forward `self.calls += 1` changes the buffer in place.",
    ],
    "dynamic": [
        "By default the first graph takes every size as a constant. Somebody has to tell the compiler before the first call.",
        "`torch._dynamo.mark_dynamic(tensor, dim)` marks a dimension of one tensor. Which dimension is the length?",
        "Mark dimension 1 of the batch, return the batch. The other dimensions stay constants, which lets the compiler use their values.",
    ],
    "pad": [
        "Which bucket does a length go to? What must the targets be where there is nothing to learn?",
        "`min(bucket for bucket in buckets if bucket >= length)`; then `F.pad(tensor, (0, missing), value=...)` pads the last dimension.",
        "`missing = bucket - tokens.shape[1]`; tokens with 0, targets with -100.",
    ],
    "buckets": [
        "The largest length needs a bucket. Is there ever a reason for a bucket that is no length of the data?",
        "Sort the lengths. A bucket takes a run of neighbours. If you knew the cheapest choice for the first k lengths, what is it for k + 1?",
        "`best[j] = min over i <= j of best[i] + compile + token_seconds * lengths[j] * (sequences in i..j)`; remember which i won, and walk back.",
    ],
    "optimizer": [
        "Which of your quantities changes at every step? It must not be a Python number.",
        "`step` and `lr` come as tensors of shape (): every formula works with them as they are. `BETA1 ** step` is a tensor.",
        "`parameter = parameter * (1 - lr * DECAY)`, then moments, then `- lr * first / (1 - BETA1 ** step) / ((second / (1 - BETA2 ** step)).sqrt() + EPS)`.",
    ],
    "blocks": [
        "The blocks of a Llama are in `model.layers`. What would be the graph of one of them?",
        "Give each block a compiled *forward*: then the module stays what it is, and its parameters keep their names.",
        "`for block in model.layers: block.forward = torch.compile(block.forward, **options)`. All blocks run the same code, so they find the same graph.",
    ],
    "break_even": [
        "After n steps the compiled run has taken compile + n · compiled, the other n · eager.",
        "Solve for n and round up. When is there no such n? And for which n does compiling that costs nothing pay?",
        "`math.ceil(compile / (eager - compiled))` if compiled < eager; for `best_mode` compare compile + steps · step of each mode.",
    ],
    "quiz": [
        "Each answer is in a figure that you have drawn or in a report of `watch_compilation`.",
        "q1, q2: count bytes. q3 to q6: read the reports of steps 2 to 6 again, or try it.",
        "q7: what does your figure of compile time against depth show? q8: the last figure.",
    ],
}

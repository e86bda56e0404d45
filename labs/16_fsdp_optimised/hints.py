"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "plan": [
        "Write down by hand what happens for three units, then look for the rhythm: what are the four actions around one forward?",
        "Forward k: gather k + 1 (if there is one), forward k, free k. Backward k: gather k - 1 (if there is one), backward k, free k, reduce k.",
        'Begin with [("gather", 0)]. Do not free the last unit after forward. With reshard=False leave out the frees of forward and the gathers of backward.',
    ],
    "policy": [
        "While unit k computes in forward, three kinds of units count: k itself, k + 1 on its way, and what the units before k have kept.",
        "peak = the largest over k of units[k] + units[k + 1] + kept * (all before k). In backward the same sums come again, in the opposite order.",
        "kept = 1 / keep if keep < world else 0; sent = all units * (world - 1) / world + all but the last * (keep - 1) / keep.",
    ],
    "wrapping": [
        "Unit k + 1 is asked for at the moment unit k begins to compute. So when can unit k + 1 begin?",
        "Between the beginnings of two forwards lies the longer of two things: computing unit k, and the message of unit k + 1. Before the first there is only a message.",
        "message(0) + sum of max(seconds(k), message(k + 1)) + seconds(last). For the choice: 10 blocks have 9 places to cut or not, 512 ways. Try them all.",
    ],
    "execute": [
        "Four dicts by unit: whole weights with their message, inputs, gradients, and pieces with theirs. Each action touches one or two of them.",
        "An asynchronous call returns a message: message.wait() before its tensor is read. Wait inside forward and backward for their own unit, for reductions at the end.",
        "gather: whole[k] = buffer, all_gather_into_tensor(buffer, shards[k], async_op=True). free: del whole[k]. reduce: reduce_scatter_tensor(piece, "
        "gradients.pop(k) / world, async_op=True). Let no other name keep the weights: a local variable lives to the end of the function.",
    ],
    "checkpoint": [
        "What does the second computation need to be the same as the first? And what must not be there after forward?",
        "ctx.save_for_backward(x), ctx.function = function, ctx.random = torch.get_rng_state(); compute under torch.no_grad(). In backward: torch.enable_grad().",
        "x = x.detach().requires_grad_(); now = get_rng_state(); set_rng_state(ctx.random); output = function(x); set_rng_state(now); torch.autograd.backward(output, grad); return None, x.grad.",
    ],
    "offload": [
        "Which copy of the weights is the true one now? The other is only made from it.",
        'master = nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True)). In step: a gradient down, the optimiser, weights up.',
        'master.grad = parameter.grad.to("cpu", torch.float32) or None; parameter.grad = None; optimizer.step(); parameter.data.copy_(master.data).',
    ],
    "hybrid": [
        "Draw the ranks as a grid, a node a row. In which direction must the large message go?",
        "First reduce_scatter_tensor(piece, gradient, group=rows): 1/S of the gradient is left. Then all_reduce(piece, group=columns).",
        "rows: range(first, first + S) for first = 0, S, 2S, ...; columns: range(place, world, S). Divide by the product of both group sizes, once.",
    ],
    "compile": [
        "A hook is called by block.__call__, which then calls block.forward. Which of the two should be compiled?",
        "block.forward = torch.compile(block.forward, backend=backend). A counting backend appends to a list and returns graph_module.forward.",
        "Inside graphs_of: torch._dynamo.reset(); define backend(graph_module, example_inputs); call torch.compile(function, backend=backend)(*inputs); return the list.",
    ],
    "sweep": [
        "Write a small function first: memory or seconds at any batch. Which two points is the batch between, and what if it is beyond the last?",
        "low, high = the first neighbours with batch <= high's, else the last two points; low + (batch - low's batch) * rise / run.",
        "batch = the first point's (skip the name if that does not fit); while the next batch fits, take it. Keep the best of batch / seconds, and (name, batch).",
    ],
    "quiz": [
        "Question 1: step 3. Question 2: which of the four parts of a rank's memory does the policy touch?",
        "Question 3: the tracer has counted in step 5. Question 4: shards are divided among the ranks of a row.",
        "Question 5: step 8, what the hooks did to the graphs.",
    ],
}

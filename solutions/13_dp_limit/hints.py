"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "parameters": [
        "Write down the shape of each matrix of one block; its parameters are the product. Biases do not exist here.",
        "q_proj is (num_heads x head_dim, hidden). Which two of the four attention matrices are narrower?",
        "attention = num_layers x hidden x (2 x query width + 2 x key width); norms = (2 x num_layers + 1) x hidden.",
    ],
    "state": [
        "Everything but the temporaries is a whole number of fp32 tensors for each parameter.",
        "Only AdamW has temporaries. For foreach they are as large as all weights; for the for-loop look for the largest single tensor.",
        "Two dicts do it: how many moments each optimiser has, and how many bytes each kind of step needs. Set the temporaries to 0 unless it is AdamW.",
    ],
    "block": [
        "Sort the rows of the table by shape: hidden wide, num_heads x head_dim wide, num_kv_heads x head_dim wide, intermediate wide.",
        "hidden wide: two fp32 tensors for each norm, and one bf16 copy for each matrix that reads a norm's output (q, k, v, gate, up).",
        "bytes per token = a x hidden + b x (query width) + c x (key width) + d x intermediate; read a, b, c and d off the table. Then times batch x seq.",
    ],
    "activations": [
        "One tensor (batch, seq, hidden) in fp32 is the unit of everything here but the logits.",
        "What a block keeps depends on checkpointing; what the last norm keeps does not.",
        "activations = num_layers x (one unit, or block_bytes) + two units.",
    ],
    "peak": [
        "Begin with what is there at every moment: weights, optimiser state, and perhaps a copy of the gradients. Add a column of the table at a time.",
        "The bf16 copies have 2 bytes for each number of attention, mlp and the output projection, which is vocab_size x hidden also when it is tied.",
        "always + bf16 copies + activations + 2.5 or 3 logits; always + gradients + copies of the embedding; always + gradients + temporaries.",
    ],
    "fits": [
        "A step needs the largest of its moments.",
        "max(....values()), and pass **settings on.",
        "Compare the largest value of step_peak with card.usable_bytes, with <=.",
    ],
    "largest": [
        "Keep two numbers: one that is known to fit, and one that is known not to.",
        "0 always fits and needs no question. Double the other until it does not fit; then ask for the middle until they are neighbours.",
        "low, high = 0, 1; while fits(high): low, high = high, 2 * high; then, while high - low > 1, move one of them to the middle.",
    ],
    "ranks": [
        "You have a function that finds the largest batch and one that says what fits. largest_batch wants a function of the batch alone.",
        "lambda batch: fits(config, card, batch, seq, **settings)",
        "Divide the global batch by the largest one and round up; but first think of what to do when the largest one is 0.",
    ],
    "loss": [
        "What would one process with all tokens divide the sum of all token losses by? Who knows that number?",
        'Count the valid targets of all ranks with dist.all_reduce. Use reduction="sum": a mean over no token is NaN.',
        "DDP will divide by world_size; you want a division by the number of valid tokens of all ranks instead. So multiply by one and divide by the other.",
    ],
    "quiz": [
        "Questions 1, 3 and 6 are answered by the plots of steps 5 and 4, and by the table of step 6.",
        "Questions 2 and 5: count bytes for each parameter.",
        "Question 4: what is one token's share in a mean of 100, and in one of 20?",
    ],
}

"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "state": [
        "Three numbers, each 4 bytes a parameter times something. Which of them is divided at which stage?",
        "Compute one share, 4 x parameters / world, and use it or the whole.",
        "weights: the share from stage 3 on; gradients: from stage 2 on; optimizer: moments x (the share from stage 1 on).",
    ],
    "pieces": [
        "Both functions think of the tensor as flat, with a length that world divides.",
        "size = ceil(numel / world) = -(-numel // world). F.pad(flat, (0, zeros)) appends. torch.empty(size * world) is what all-gather fills.",
        "padded[rank * size : (rank + 1) * size].clone(); and dist.all_gather_into_tensor(padded, piece), then padded[:numel].view(shape).",
    ],
    "stage1": [
        "Three lists of the same length: parameters, pieces, and gradients of pieces. The optimiser only ever sees the second.",
        "step: cut each gradient with piece_of, step, gather each piece with whole and copy it into the parameter.",
        "piece.grad = piece_of(parameter.grad, rank, world); self.optimizer.step(); parameter.data.copy_(whole(piece.data, parameter.shape)).",
    ],
    "norm": [
        "Norms do not add up. Their squares do.",
        "Add the squares of all pieces on this rank, all-reduce that number, take the root.",
        "torch.stack([piece.square().sum() for piece in pieces]).sum(), dist.all_reduce, sqrt.",
    ],
    "stage2": [
        "What does the all-reduce of lab 11 become when only one rank needs each part of the result?",
        "In the hook: flatten, divide by world, pad; dist.reduce_scatter_tensor(own, padded) with own of the piece's size.",
        "piece.grad = own if piece.grad is None else piece.grad + own; parameter.grad = None. In the lambda write piece=piece.",
    ],
    "stage3": [
        "forward of Gather is whole; backward is the hook of step 5 without the hook.",
        "backward returns the gradient of the piece and None for the shape. sharded_linear puts gather and F.linear into one function for checkpoint.",
        "torch.utils.checkpoint.checkpoint(lambda x, piece: F.linear(x, Gather.apply(piece, shape)), x, weight_piece, use_reentrant=False)",
    ],
    "settings": [
        "Read with .get and a default; the nested dicts may be missing.",
        "First find accumulation: 1, unless total and batch are both given or it is given itself. Then batch from what is left. Then check the product.",
        "if batch * steps * world != total: raise ValueError. bucket_bytes = 4 * elements. `value or None` makes None of 0.",
    ],
    "quiz": [
        "Questions 1 and 2: the table at the beginning.",
        "Question 3: step 4. Question 5: step 9.",
        "Question 4: who computes layer 7 in each of the two?",
    ],
}

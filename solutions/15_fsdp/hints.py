"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "flat": [
        "torch.cat of all flattened tensors is the vector. The rest is lab 14's piece of one tensor.",
        "size = -(-flat.numel() // world); F.pad(flat, (0, zeros)). On the way back forget the padding, then split by the numbers of each shape.",
        "dist.all_gather_into_tensor(flat, shard); flat[:sum(sizes)].split(sizes); each part .view(shape).",
    ],
    "padding": [
        "How much is missing to the next multiple of N? Once for all numbers together, once for each parameter's rows.",
        "-n % world is what is missing. A missing row counts math.prod(shape[1:]) numbers.",
        "flat: -sum(numbers) % world; rows: the sum of (-math.prod(shape[:1]) % world) * math.prod(shape[1:]).",
    ],
    "rows": [
        "c = ceil(length / world) rows for everyone, until there are none left: min(..., length) for both ends.",
        "In the row each parameter takes c * inner numbers, but only (stop - start) * inner are real. inner = math.prod(shape[1:]).",
        "views.append(row[offset : offset + (stop - start) * inner].view(stop - start, *shape[1:])); offset += c * inner.",
    ],
    "pack": [
        "Make a (world, c * inner) table of each tensor alone. Then put the tables side by side.",
        "F.pad(tensor.reshape(-1), (0, zeros)).view(world, size), and torch.cat(parts, dim=1). Padding is at the end of each tensor.",
        "unpack: packed[:, offset : offset + size].reshape(-1)[: math.prod(shape)].view(shape).",
    ],
    "unshard": [
        "Four things: send the row, unpack what comes, fill the whole tensors, put them into the modules.",
        "unit.row.detach().to(unit.compute_dtype) is sent; packed = row.new_empty(world, row.numel()) receives, as packed.view(-1).",
        "for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)): storage.resize_(numel * element_size), whole.data.copy_(value). Then put(unit, True).",
    ],
    "reshard": [
        "The cell before step 5 shows the line that frees a tensor.",
        "All of unit.wholes, the frozen ones too.",
        "for whole in unit.wholes: whole.untyped_storage().resize_(0); then put(unit, False).",
    ],
    "reduce": [
        "pack is for gradients, too: row r of the packed gradients is what rank r needs the sum of.",
        "dist.reduce_scatter_tensor(row, packed.view(-1)) with row of packed.shape[1] numbers. shard_views cuts the row, with the shapes of the trained ones.",
        "(row / world).to(unit.row.dtype); shard.grad = part if shard.grad is None else shard.grad + part; whole.grad = None.",
    ],
    "units": [
        "First collect all names of each parameter. Then ask of each block whether all of them begin with the block's name and a dot.",
        "model.named_modules() gives names and blocks in order; a dict from parameter to list of names collects the names.",
        "all(name.startswith(block + '.') for name in names): this block's unit; if no block is found, the root's. Drop blocks with no names.",
    ],
    "hooks": [
        "Write four functions with the names of the table's rows, each taking a unit, and a list of the units whose backward is not over.",
        "before_forward registers after_backward on the inputs, after_forward registers before_backward on the output. before_backward of the root queues the end.",
        "In a loop over units bind the unit: lambda module, args, unit=unit: before_forward(unit, args). At the end of backward: after_backward for all that is left in the list.",
    ],
    "state": [
        "unshard gathers in compute_dtype, so gather the row itself, as in step 5 but without the cast.",
        "For each unit: all-gather of unit.row.detach(), unpack, and one entry for each name in unit.names.",
        "for names, value in zip(unit.names, unpack(packed, unit.shapes)): for name in names: state[name] = value.clone(). And model.named_buffers().",
    ],
    "train": [
        "One process with everything would divide the sum over all targets by their number. What does reduce_gradients divide by already?",
        'F.cross_entropy(..., ignore_index=-100, reduction="sum") * world / count, where count was all-reduced once, before the first micro-batch.',
        "Add loss / world over micro-batches and all-reduce that for the return value. optimizer.step(), then set every shard.grad to None.",
    ],
    "quiz": [
        "Question 1: 16 bytes a parameter. And what is whole after backward?",
        "Questions 2 to 4: steps 1, 7 and 9.",
        "Question 5: bf16 keeps 8 bits of a number. Question 6: a gather is a collective.",
    ],
}

"""Planted mistakes of inference, question by question."""

from dlo_lib.grading.lab.mutant_table import mutant_table

MUTANTS = mutant_table("""
    [cache]
    New tokens are at position 0
        check_token, check_several, check_returned, check_one_key_head: the position `past`, not 0
        torch.arange(past, past + new)  =>  torch.arange(new)
        > positions[:, None]  =>  > positions[:, None] + past
    No mask
        check_prompt, check_several, check_one_key_head: the mask is missing
        scores.masked_fill(hidden, float("-inf")).softmax(-1)  =>  scores.softmax(-1)
    The list of key heads is repeated
        check_prompt, check_token, check_several: repeat each key head
        every_key = keys.repeat_interleave(group, 1)  =>  every_key = keys.repeat(1, group, 1, 1)
        every_value = values.repeat_interleave(group, 1)  =>  every_value = values.repeat(1, group, 1, 1)
    Only the new keys are returned
        check_returned: the past is missing
        return out @ weights["o"].T, keys, values  =>
            return out @ weights["o"].T, keys[:, :, past:], values[:, :, past:]
    Scores are not divided
        check_prompt, check_token, check_several, check_one_key_head: the output for a prompt
        .transpose(2, 3) / head_dim**0.5  =>  .transpose(2, 3)
    The mask is that of a prompt
        check_several, check_token, check_one_key_head: query i sees the keys
        > positions[:, None]  =>  > torch.arange(new)[:, None]

    [memory]
    All heads are stored
        check_cache_bytes, check_decode, check_prefill, check_largest, check_other_config: only the key-value heads
        config["kv_heads"] * config["head_dim"] * tokens  =>  config["heads"] * config["head_dim"] * tokens
    The weights are read for each sequence
        check_decode, check_prefill: the weights are read once
        read = 2 * config["weights"] + batch  =>  read = batch * 2 * config["weights"] + batch
    Attention computes nothing
        check_decode, check_prefill: the FLOPs of attention are missing
        batch * new + attention) / read  =>  batch * new) / read
    Every token of a prompt sees all others
        check_prefill: a token sees no new token after it
        new * (new + 1) // 2  =>  new * new
    A token does not see itself
        check_decode, check_prefill: a token sees itself
        new * (new + 1) // 2  =>  new * (new - 1) // 2
    Attention has the key heads
        check_decode, check_prefill: attention has `heads` query heads
        attention = 4 * config["layers"] * config["heads"]  =>  attention = 4 * config["layers"] * config["kv_heads"]
    The new tokens are not stored
        check_decode, check_prefill: the keys of new tokens are read too
        cache_bytes(config, past + new)  =>  cache_bytes(config, past)
    The batch of a small GPU is negative
        check_largest: with room for 0
        max(0, (memory - 2 * config["weights"]) // cache_bytes(config, tokens))  =>
            (memory - 2 * config["weights"]) // cache_bytes(config, tokens)

    [pool]
    Blocks are taken one token too late
        check_tables, check_release, check_fork, check_full, check_everything: no place in the pool
        offset, source = length % self.size, None  =>
            offset, source = length % (self.size + 1), None
    Nothing is released
        check_release, check_full, check_everything: free() is
        self.unused.append(block)  =>  pass
    A fork counts no owners
        check_fork, check_full, check_everything: free() is
        self.owners[block] += 1  =>  pass
    A shared block is not copied
        check_fork, check_full, check_everything: or was not copied
        source = table[-1]  =>  pass
        self.owners[source] -= 1  =>  self.owners[table[-1]] -= 1
    Releasing frees blocks that others have
        check_fork, check_full, check_everything: free() is
        if not self.owners[block]:  =>  if True:
    The copied block loses no owner
        check_fork, check_full, check_everything: `source` should be None
        self.owners[source] -= 1  =>  pass
    A refused token counts
        check_full: raise a MemoryError
        raise MemoryError("no block is free")  =>
            self.lengths[seq] = length + bool(table)
            raise MemoryError("no block is free")
    A refused copy takes an owner from the shared block
        check_full: raise a MemoryError
        raise MemoryError("no block is free")  =>
            if offset:
                self.owners[table[-1]] -= 1
            raise MemoryError("no block is free")
    The last block is the source of every token
        check_tables, check_release, check_fork, check_full, check_everything: `source` should be None
        offset, source = length % self.size, None  =>
            offset, source = length % self.size, table[-1] if table else None

    [paged]
    The first blocks of the memory are read
        check_full_blocks, check_unused_slots, check_other_pages: through full blocks
        memory[table]  =>  memory.nan_to_num()[: len(table)]
    Blocks are read in the order of the memory
        check_unused_slots, check_other_pages: NaN times 0 is NaN
        memory[table]  =>  memory[sorted(table)]
    Unused slots are read
        check_unused_slots, check_other_pages: NaN times 0 is NaN
        [:length].repeat_interleave(group, 1)  =>  .repeat_interleave(group, 1)

    [plan]
    The end token counts from the second token on
        check_finish, check_served: is not finished
        eos in request["output"][-1:]  =>  eos in request["output"][1:][-1:]
    One token more than the limit
        check_finish, check_served: is not finished
        len(request["output"]) == request["limit"]  =>  len(request["output"]) > request["limit"]
    Finished blocks are free in the next iteration
        check_admit, check_other_states: free at once
        free += sum(request["blocks"] for request in finish)  =>  pass
    A small request overtakes
        check_admit: no later one overtakes it
        break  =>
            if preempt or len(run) == most:
                break
            continue
    The largest batch is ignored
        check_admit, check_served: no more than `most`
        if preempt or len(run) == most or  =>  if preempt or
    The new token has a place at once
        check_admit, check_other_states: gets its place in the next iteration
        len(request["output"])) // size) - request  =>  len(request["output"]) + 1) // size) - request
    The oldest request is pre-empted
        check_preempt: the newest running requests
        preempt.append(run.pop())  =>  preempt.append(run.pop(0))
    Requests are admitted beside a pre-emption
        check_preempt: after a pre-emption
        if preempt or len(run)  =>  if len(run)
    A batch is static
        check_served, check_admit, check_other_states: static batches need
        for request in left:  =>  for request in left if not run else []:

    [chunks]
    Decoding requests are served in the order of the list
        check_decodes, check_small_budget: come before the prompts
        budget -= rest.count(0)  =>  pass
        counts.append(min(tokens, budget) if tokens else 1)  =>  counts.append(min(tokens or 1, budget))
        if tokens:  =>  if True:
    The budget is for prompts only
        check_budget, check_drained, check_small_budget: the budget is
        budget -= rest.count(0)  =>  pass
    The last prompt is served first
        check_budget: oldest prompt first
        for tokens in rest:  =>  for tokens in reversed(rest):
        return counts  =>  return counts[::-1]
    A prompt is computed in equal parts
        check_drained, check_budget: are enough
        min(tokens, budget) if tokens else 1  =>  min(tokens, budget, 1) if tokens else 1

    [verify]
    Every token is accepted
        check_accepted, check_rejected, check_certain: is right
        >= p[row, token] / q[row, token]  =>  >= 1
    A token is accepted with probability p
        check_accepted, check_bonus, check_rejected: is right
        >= p[row, token] / q[row, token]  =>  >= p[row, token]
    The ratio is turned around
        check_accepted, check_rejected, check_certain: is right
        p[row, token] / q[row, token]  =>  q[row, token] / p[row, token]
    A rejected token is drawn from p
        check_rejected: max(0, p - q) gives
        (p[row] - q[row]).clamp(min=0)  =>  p[row]
    The bonus is forgotten
        check_bonus, check_accepted, check_rejected, check_certain: answers are shorter
        return [*drafted, int(torch.multinomial(p[-1], 1, generator=generator))]  =>  return drafted
    The bonus is the most probable token
        check_bonus: of the runs, p has
        int(torch.multinomial(p[-1], 1, generator=generator))  =>  int(p[-1].argmax())

    [speculate]
    Nothing is drafted
        check_calls: calls of the target for
        for _ in range(gamma):  =>  for _ in range(0):
        p = target(tokens + drafted, gamma + 1)  =>  p = target(tokens, 1)
        verify(p, torch.stack(q), drafted, generator)  =>  verify(p, p, drafted, generator)
    The bonus of the last round is kept
        check_text, check_calls, check_sampled: should be
        return tokens[len(prompt) : len(prompt) + count]  =>  return tokens[len(prompt) :]
    The draft does not see its own tokens
        check_calls: calls of the target for
        draft(tokens + drafted)  =>  draft(tokens)
    Every text has the same seed
        check_sampled: of 250 runs
        manual_seed(seed)  =>  manual_seed(1)
    Each later round has its own generator
        check_generator: make the generator once
        drafted, q = [], []  =>
            drafted, q = [], []
            if len(tokens) > len(prompt) + 1:
                generator = torch.Generator().manual_seed(seed)
    Drafted tokens are drawn without the generator
        check_generator: draw *all* tokens with the generator
        torch.multinomial(q[-1], 1, generator=generator)  =>  torch.multinomial(q[-1], 1)
    The list of the prompt grows
        check_generator: the list `prompt` of the caller
        tokens = list(prompt)  =>  tokens, prompt = prompt, list(prompt)
    The draft is not checked
        check_text, check_calls, check_sampled: the text is
        tokens += verify(p, torch.stack(q), drafted, generator)  =>  tokens += drafted
""")

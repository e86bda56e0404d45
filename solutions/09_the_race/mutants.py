"""Planted mistakes of the race, question by question."""

from dlo_lib.grading.lab.mutant_table import mutant_table

MUTANTS = mutant_table("""
    [flops]
    The stride of a convolution is ignored
        check_forward, check_affordable: size / s pixels a side
        size = math.ceil(size / stride)  =>  size = size
    A pool does not change the size
        check_pool: size // 2
        size //= 2  =>  size //= 1
    The first layer has a gradient of its input
        check_backward, check_affordable: needs no gradient of its input
        2 * sum(costs) - costs[0]}  =>  2 * sum(costs)}
    The race's bound on the steps is forgotten
        check_affordable: the race allows 256
        return min(race.MOST_STEPS, int(budget // (batch * sum(flops(layers, size).values()))))  =>
            return int(budget // (batch * sum(flops(layers, size).values())))

    [update]
    The update is added to what is subtracted: it leads up
        check_descends: of the loss are left
        updates.append(rate * factor * (gradient + 0.5 * momentum))  =>
            updates.append(-rate * factor * (gradient + 0.5 * momentum))
    The schedule is that of 25 steps
        check_schedule: let the rate fall
        warm = max(1, steps // 10)  =>  warm = 10 * steps
    The rate has a floor
        check_rate: times the rate
        rate * factor * (  =>  max(rate, 0.06) * factor * (
    The first weight of each parameter gets half of its update
        check_coordinates: where a weight stands
        kept.append({"momentum": momentum})  =>
            kept.append({"momentum": momentum})
            updates[-1].view(-1)[0] *= 0.5
    Momentum is kept in a global
        check_resume: keep all that a rule remembers
        answer:
            KEPT = {}

            def update(gradients, states, step, steps, rate):
                updates = []
                for number, gradient in enumerate(gradients):
                    before = KEPT.get((number, step - 1), torch.zeros_like(gradient))
                    KEPT[number, step] = gradient + 0.9 * before
                    updates.append(rate * (1 - step / steps) * KEPT[number, step])
                return updates, states
    All steps are equally long, except the last one
        check_schedule: let the rate fall earlier
        factor = (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2  =>
            factor = 1.0 if step < steps - 1 else 0.0
    The momentum of the last step is changed in place
        check_kept: gives two results
        momentum = gradient + 0.5 * state.get("momentum", torch.zeros_like(gradient))  =>
            momentum = state.get("momentum", torch.zeros_like(gradient)).mul_(0.5).add_(gradient)

    [augment]
    The mirror of the books
        check_class: another class
        images.flip(2, 3)  =>  images.flip(3)
    One draw for the whole batch
        check_own_draws: changed alike
        answer:
            def augment(images, seed):
                generator = torch.Generator().manual_seed(seed)
                sign = torch.rand((), generator=generator) - 1.5
                return images.flip(2, 3) * sign
    The seed is not used
        check_seed, check_beside: in another process
        generator = torch.Generator().manual_seed(seed)  =>  generator = torch.default_generator
    Two seeds are all
        check_seed: two of five seeds
        manual_seed(seed)  =>  manual_seed(seed % 2)
    A brightness that changes by a ten-thousandth
        check_own_draws, check_class, check_beside: by 2 % or more
        return torch.where(turn, images.flip(2, 3), images) * sign  =>
            return torch.where(turn, images * 1.0001, images) + 1e-4 * sign
    The images are changed in place
        check_beside: has changed the images
        return torch.where(turn, images.flip(2, 3), images) * sign  =>  return images.mul_(sign)
    The global generator is seeded
        check_beside: global generator
        torch.Generator().manual_seed(seed)  =>  torch.manual_seed(seed)

    [fair]
    The interval is that of single runs
        check_interval, check_decides: smaller by the root of n
        / math.sqrt(len(scores))  =>
    The intervals of both means are compared
        check_paired, check_places: on each seed
        return interval([one - other for one, other in zip(ours, theirs)])[0] > 0  =>
            return interval(ours)[0] > interval(theirs)[1]
    The runs are sorted, and then compared
        check_paired: varies far more than its mean
        zip(ours, theirs)])[0] > 0  =>  zip(sorted(ours), sorted(theirs))])[0] > 0
    Better on every seed is better
        check_decides: should be False
        return interval([one - other for one, other in zip(ours, theirs)])[0] > 0  =>
            return min(one - other for one, other in zip(ours, theirs)) > 0
    The normal distribution decides
        check_decides: reaches just below 0
        return interval([one - other for one, other in zip(ours, theirs)])[0] > 0  =>
            rises = [one - other for one, other in zip(ours, theirs)]
            return mean(rises) > 1.96 * stdev(rises) / math.sqrt(len(rises))
    A tie counts
        check_decides, check_places: is 0 on each seed
        zip(ours, theirs)])[0] > 0  =>  zip(ours, theirs)])[0] >= 0
    Places are those of the means
        check_places: are shown to be better
        sum(shown(other, scores) for  =>  sum(mean(other) > mean(scores) for

    [track]
    The labels are left out
        check_fingerprint, check_dtype: one label has changed
        for tensor in (images, labels):  =>  for tensor in (images,):
    The dtype is left out
        check_dtype: images of another dtype
        {tensor.dtype} {tuple(tensor.shape)}  =>  {tuple(tensor.shape)}
    The printed tensor is hashed, which leaves out most values
        check_fingerprint: one of 6912 values
        whole.update(tensor.contiguous().numpy().tobytes())  =>  whole.update(str(tensor).encode())
    The bytes are hashed as they lie in memory
        check_layout: channels-last
        whole.update(tensor.contiguous().numpy().tobytes())  =>
            whole.update(str(tensor.stride()).encode())
            whole.update(tensor.contiguous().numpy().tobytes())
    Only absent fields are missing
        check_missing: expected
        if record.get(name) in (None, "", {})]  =>  if name not in record]
    A seed of 0 is missing
        check_zero: expected []
        if record.get(name) in (None, "", {})]  =>  if not record.get(name)]

    [race]
    The commit is a word
        check_allowed: the commit should be
        "commit": "0123456",  =>  "commit": "my best run",
    The rate is so small that nothing is learnt
        check_baseline, check_good, check_very_good: not shown
        "rate": 0.5,  =>  "rate": 1e-5,
    A batch of 64, so that the budget pays 29 steps
        check_good, check_very_good: 70 % earns these points
        "batch": 16,  =>  "batch": 64,
    A batch of 46, so that the budget pays 40 steps
        check_very_good: 80 % earns these points
        "batch": 16,  =>  "batch": 46,
""")

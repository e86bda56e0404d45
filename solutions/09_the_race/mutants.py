"""Planted mistakes of the race, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- flops
    Mutant(
        "The stride of a convolution is ignored",
        "check_forward",
        says="size / s pixels a side",
        replace={"size = math.ceil(size / stride)": "size = size"},
        also=("check_affordable",),
    ),
    Mutant(
        "A pool does not change the size",
        "check_pool",
        says="size // 2",
        replace={"size //= 2": "size //= 1"},
    ),
    Mutant(
        "The first layer has a gradient of its input",
        "check_backward",
        says="needs no gradient of its input",
        replace={"2 * sum(costs) - costs[0]}": "2 * sum(costs)}"},
        also=("check_affordable",),
    ),
    Mutant(
        "The race's bound on the steps is forgotten",
        "check_affordable",
        says="the race allows 256",
        replace={
            "return min(race.MOST_STEPS, int(budget // (batch * sum(flops(layers, size).values()))))": """
            return int(budget // (batch * sum(flops(layers, size).values())))
            """
        },
    ),
    # -- update
    Mutant(
        "The update is added to what is subtracted: it leads up",
        "check_descends",
        says="of the loss are left",
        replace={
            "updates.append(rate * factor * (gradient + 0.5 * momentum))": """
            updates.append(-rate * factor * (gradient + 0.5 * momentum))
            """
        },
    ),
    Mutant(
        "The schedule is that of 25 steps",
        "check_schedule",
        says="let the rate fall",
        replace={"warm = max(1, steps // 10)": "warm = 10 * steps"},
    ),
    Mutant(
        "The rate has a floor",
        "check_rate",
        says="times the rate",
        replace={"rate * factor * (": "max(rate, 0.06) * factor * ("},
    ),
    Mutant(
        "The first weight of each parameter gets half of its update",
        "check_coordinates",
        says="where a weight stands",
        replace={
            'kept.append({"momentum": momentum})': """
            kept.append({"momentum": momentum})
            updates[-1].view(-1)[0] *= 0.5
            """
        },
    ),
    Mutant(
        "Momentum is kept in a global",
        "check_resume",
        says="keep all that a rule remembers",
        answer="""
        KEPT = {}

        def update(gradients, states, step, steps, rate):
            updates = []
            for number, gradient in enumerate(gradients):
                before = KEPT.get((number, step - 1), torch.zeros_like(gradient))
                KEPT[number, step] = gradient + 0.9 * before
                updates.append(rate * (1 - step / steps) * KEPT[number, step])
            return updates, states
        """,
    ),
    Mutant(
        "All steps are equally long, except the last one",
        "check_schedule",
        says="let the rate fall earlier",
        replace={
            "factor = (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2": """
            factor = 1.0 if step < steps - 1 else 0.0
            """
        },
    ),
    Mutant(
        "The momentum of the last step is changed in place",
        "check_kept",
        says="gives two results",
        replace={
            'momentum = gradient + 0.5 * state.get("momentum", torch.zeros_like(gradient))': """
            momentum = state.get("momentum", torch.zeros_like(gradient)).mul_(0.5).add_(gradient)
            """
        },
    ),
    # -- augment
    Mutant(
        "The mirror of the books",
        "check_class",
        says="another class",
        replace={"images.flip(2, 3)": "images.flip(3)"},
    ),
    Mutant(
        "One draw for the whole batch",
        "check_own_draws",
        says="changed alike",
        answer="""
        def augment(images, seed):
            generator = torch.Generator().manual_seed(seed)
            sign = torch.rand((), generator=generator) - 1.5
            return images.flip(2, 3) * sign
        """,
    ),
    Mutant(
        "The seed is not used",
        "check_seed",
        says="in another process",
        replace={
            "generator = torch.Generator().manual_seed(seed)": "generator = torch.default_generator",
        },
        also=("check_beside",),
    ),
    Mutant(
        "Two seeds are all",
        "check_seed",
        says="two of five seeds",
        replace={"manual_seed(seed)": "manual_seed(seed % 2)"},
    ),
    Mutant(
        "A brightness that changes by a ten-thousandth",
        "check_own_draws",
        says="by 2 % or more",
        replace={
            "return torch.where(turn, images.flip(2, 3), images) * sign": """
            return torch.where(turn, images * 1.0001, images) + 1e-4 * sign
            """
        },
        also=("check_class", "check_beside"),
    ),
    Mutant(
        "The images are changed in place",
        "check_beside",
        says="has changed the images",
        replace={"return torch.where(turn, images.flip(2, 3), images) * sign": "return images.mul_(sign)"},
    ),
    Mutant(
        "The global generator is seeded",
        "check_beside",
        says="global generator",
        replace={"torch.Generator().manual_seed(seed)": "torch.manual_seed(seed)"},
    ),
    # -- fair
    Mutant(
        "The interval is that of single runs",
        "check_interval",
        says="smaller by the root of n",
        replace={" / math.sqrt(len(scores))": ""},
        also=("check_decides",),
    ),
    Mutant(
        "The intervals of both means are compared",
        "check_paired",
        says="on each seed",
        replace={
            "return interval([one - other for one, other in zip(ours, theirs)])[0] > 0": """
            return interval(ours)[0] > interval(theirs)[1]
            """
        },
        also=("check_places",),
    ),
    Mutant(
        "The runs are sorted, and then compared",
        "check_paired",
        says="varies far more than its mean",
        replace={"zip(ours, theirs)])[0] > 0": "zip(sorted(ours), sorted(theirs))])[0] > 0"},
    ),
    Mutant(
        "Better on every seed is better",
        "check_decides",
        says="should be False",
        replace={
            "return interval([one - other for one, other in zip(ours, theirs)])[0] > 0": """
            return min(one - other for one, other in zip(ours, theirs)) > 0
            """
        },
    ),
    Mutant(
        "The normal distribution decides",
        "check_decides",
        says="reaches just below 0",
        replace={
            "return interval([one - other for one, other in zip(ours, theirs)])[0] > 0": """
            rises = [one - other for one, other in zip(ours, theirs)]
            return mean(rises) > 1.96 * stdev(rises) / math.sqrt(len(rises))
            """
        },
    ),
    Mutant(
        "A tie counts",
        "check_decides",
        says="is 0 on each seed",
        replace={"zip(ours, theirs)])[0] > 0": "zip(ours, theirs)])[0] >= 0"},
        also=("check_places",),
    ),
    Mutant(
        "Places are those of the means",
        "check_places",
        says="are shown to be better",
        replace={"sum(shown(other, scores) for": "sum(mean(other) > mean(scores) for"},
    ),
    # -- track
    Mutant(
        "The labels are left out",
        "check_fingerprint",
        says="one label has changed",
        replace={"for tensor in (images, labels):": "for tensor in (images,):"},
        also=("check_dtype",),
    ),
    Mutant(
        "The dtype is left out",
        "check_dtype",
        says="images of another dtype",
        replace={"{tensor.dtype} {tuple(tensor.shape)}": "{tuple(tensor.shape)}"},
    ),
    Mutant(
        "The printed tensor is hashed, which leaves out most values",
        "check_fingerprint",
        says="one of 6912 values",
        replace={"whole.update(tensor.contiguous().numpy().tobytes())": "whole.update(str(tensor).encode())"},
    ),
    Mutant(
        "The bytes are hashed as they lie in memory",
        "check_layout",
        says="channels-last",
        replace={
            "whole.update(tensor.contiguous().numpy().tobytes())": """
            whole.update(str(tensor.stride()).encode())
            whole.update(tensor.contiguous().numpy().tobytes())
            """
        },
    ),
    Mutant(
        "Only absent fields are missing",
        "check_missing",
        says="expected",
        replace={'if record.get(name) in (None, "", {})]': "if name not in record]"},
    ),
    Mutant(
        "A seed of 0 is missing",
        "check_zero",
        says="expected []",
        replace={'if record.get(name) in (None, "", {})]': "if not record.get(name)]"},
    ),
    # -- race
    Mutant(
        "The commit is a word",
        "check_allowed",
        says="the commit should be",
        replace={'"commit": "0123456",': '"commit": "my best run",'},
    ),
    Mutant(
        "The rate is so small that nothing is learnt",
        "check_baseline",
        says="not shown",
        replace={'"rate": 0.5,': '"rate": 1e-5,'},
        also=("check_good", "check_very_good"),
    ),
    Mutant(
        "A batch of 64, so that the budget pays 29 steps",
        "check_good",
        says="70 % earns these points",
        replace={'"batch": 16,': '"batch": 64,'},
        also=("check_very_good",),
    ),
    Mutant(
        "A batch of 46, so that the budget pays 40 steps",
        "check_very_good",
        says="80 % earns these points",
        replace={'"batch": 16,': '"batch": 46,'},
    ),
]

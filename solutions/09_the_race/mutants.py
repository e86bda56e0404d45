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
            "updates.append(rate * factor * (gradient + 0.9 * momentum))": """
            updates.append(-rate * factor * (gradient + 0.9 * momentum))
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
                before = KEPT.get(number) if step else None
                KEPT[number] = gradient + 0.9 * (torch.zeros_like(gradient) if before is None else before)
                updates.append(rate * (1 - step / steps) * KEPT[number])
            return updates, states
        """,
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
    ),
    # -- fair
    Mutant(
        "The interval is that of single runs",
        "check_interval",
        says="smaller by the root of n",
        replace={" / math.sqrt(len(scores))": ""},
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
        replace={'"rate": 0.2,': '"rate": 1e-5,'},
        also=("check_good", "check_very_good"),
    ),
    Mutant(
        "A batch of 64, so that the budget pays 32 steps",
        "check_good",
        says="80 % earns these points",
        replace={'"batch": 16,': '"batch": 64,'},
        also=("check_very_good",),
    ),
    Mutant(
        "The model of the baseline, for which the budget pays 47 steps",
        "check_very_good",
        says="90 % earns these points",
        replace={
            '[("conv", 12, 5, 2), ("norm",), ("relu",), ("conv", 24, 3, 2), ("norm",), ("relu",)],': """
            race.BASELINE["layers"],
            """,
            '"batch": 16,': '"batch": 32,',
        },
    ),
]

"""Planted mistakes of The data pipeline, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- waits
    Mutant(
        "The clock is not read again after the step",
        "check_waits",
        says="Each wait includes the step before it",
        replace={
            """
            before = clock()
            steps.append(before - arrived)
            """: """
            steps.append(clock() - arrived)
            before = arrived
            """
        },
    ),
    Mutant(
        "The clock is read in the loop only",
        "check_waits",
        says="Every wait is 0",
        replace={"arrived = clock()": "before = arrived = clock()"},
    ),
    Mutant(
        "Each wait begins with the first one",
        "check_waits",
        says="Each wait begins when the first one does",
        replace={
            """
            before = clock()
            steps.append(before - arrived)
            """: "steps.append(clock() - arrived)"
        },
    ),
    Mutant(
        "Another clock than the one that is given",
        "check_waits",
        says="and no other clock",
        replace={"waits, steps = [], []": "waits, steps, clock = [], [], time.perf_counter"},
        also=["check_steps"],
    ),
    Mutant(
        "The iteration begins before the clock is read",
        "check_waits",
        says="lacks the start of the loader",
        replace={
            """
            before = clock()
            for batch in loader:
            """: """
            batches = iter(loader)
            before = clock()
            for batch in batches:
            """
        },
    ),
    Mutant(
        "All batches are loaded before the first step",
        "check_waits",
        says="one batch at a time",
        replace={"for batch in loader:": "for batch in list(loader):"},
    ),
    Mutant(
        "The duration of a step includes its wait",
        "check_steps",
        says="a step begins when its batch has arrived",
        replace={
            """
            before = clock()
            steps.append(before - arrived)
            """: """
            now = clock()
            steps.append(now - before)
            before = now
            """
        },
    ),
    Mutant(
        "The share includes the first batch",
        "check_share",
        says="leave it out",
        replace={"sum(waits[1:]), sum(steps[1:])": "sum(waits), sum(steps)"},
    ),
    Mutant(
        "The share is waiting divided by computing",
        "check_share",
        says="divide by the whole time",
        replace={"waited / (waited + worked)": "waited / worked"},
    ),
    # -- steady
    Mutant(
        "Without workers, loading and computing are assumed to overlap",
        "check_no_workers",
        says="both times add up",
        replace={"return load + step": "return max(load, step)"},
    ),
    Mutant(
        "With workers, the times add up",
        "check_with_workers",
        says="the slower one decides",
        replace={"max(step, load / workers)": "step + load / workers"},
    ),
    Mutant(
        "The step of the model is forgotten",
        "check_with_workers",
        says="cannot be faster than its own step",
        replace={"max(step, load / workers)": "load / workers"},
    ),
    Mutant(
        "The number of workers is rounded down and increased",
        "check_fewest",
        says="an exact ratio is enough",
        replace={"max(1, math.ceil(load / step))": "int(load / step) + 1"},
    ),
    Mutant(
        "No worker for a loader that takes no time",
        "check_fewest",
        says="the smallest number is 1",
        replace={
            "max(1, math.ceil(load / step))": "math.ceil(load / step)",
        },
    ),
    # -- seed_worker
    Mutant(
        "The seed is the base seed, the same for all workers",
        "check_workers_differ",
        says="draw the same numbers",
        replace={"[info.seed, rank]": "[info.seed - worker_id, rank]"},
    ),
    Mutant(
        "The number of the worker is the seed",
        "check_epochs_differ",
        says="the same numbers in every epoch",
        replace={"[info.seed, rank]": "[worker_id, rank]"},
    ),
    Mutant(
        "The rank is not in the seed",
        "check_ranks_differ",
        says="the rank is not in the seed",
        replace={"[info.seed, rank]": "info.seed"},
    ),
    Mutant(
        "Seed and rank are added",
        "check_ranks_differ",
        says="a sum of seed and rank is the same for both",
        replace={"[info.seed, rank]": "info.seed + rank"},
    ),
    Mutant(
        "Seed and ten times the rank are added",
        "check_ranks_differ",
        says="a sum of seed and rank is the same for both",
        replace={"[info.seed, rank]": "info.seed + 10 * rank"},
    ),
    Mutant(
        "The generator takes its seed from the system",
        "check_repeatable",
        says="no run can be repeated",
        replace={"[info.seed, rank]": ""},
    ),
    Mutant(
        "The generator is a RandomState",
        "check_generator",
        says="old interface",
        replace={
            "np.random.default_rng([info.seed, rank])": "np.random.RandomState([info.seed % 2**32, rank])",
        },
    ),
    # -- split
    Mutant(
        "The stream is divided by ranks, not by workers",
        "check_once",
        says="each worker reads those of the others too",
        replace={"own[worker::workers]": "own"},
    ),
    Mutant(
        "The stream is divided by workers, not by ranks",
        "check_once",
        says="divide by ranks too",
        replace={"range(self.rank, end, self.world)": "range(0, end, self.world)"},
    ),
    Mutant(
        "The items that are left over go to the first ranks",
        "check_equal_ranks",
        says="a rank waits forever",
        replace={"end = len(self.items) // self.world * self.world": "end = len(self.items)"},
    ),
    Mutant(
        "The last worker takes what is left over",
        "check_even_workers",
        says="may differ by one",
        replace={
            "for place in own[worker::workers]:": """
            part = len(own) // workers
            for place in own[worker * part : None if worker == workers - 1 else (worker + 1) * part]:
            """
        },
    ),
    Mutant(
        "Each worker has a block of ceil(n / workers) items",
        "check_even_workers",
        says="leave too few for the last worker",
        replace={
            "for place in own[worker::workers]:": """
            part = math.ceil(len(own) / workers)
            for place in own[worker * part : (worker + 1) * part]:
            """
        },
    ),
    Mutant(
        "What is left over between workers is dropped too",
        "check_equal_ranks",
        says="Its workers need no equal shares",
        replace={"// self.world * self.world": "// (self.world * workers) * self.world * workers"},
    ),
    Mutant(
        "There is always a worker",
        "check_without_workers",
        says="NoneType",
        replace={"(info.id, info.num_workers) if info else (0, 1)": "info.id, info.num_workers"},
    ),
    # -- mixup
    Mutant(
        "The targets have the weights of the two labels exchanged",
        "check_targets",
        says="they are exchanged",
        replace={
            "torch.lerp(own[partner], own, share[:, None])": "torch.lerp(own, own[partner], share[:, None])"
        },
    ),
    Mutant(
        "The images have the share of their partners",
        "check_averaged",
        says="lam is the share of the image",
        replace={"torch.lerp(images[partner], images, lam": "torch.lerp(images, images[partner], lam"},
    ),
    Mutant(
        "One share for the whole batch",
        "check_averaged",
        says="All images have the share of the first one",
        replace={"lam[:, None, None, None]": "lam[:1, None, None, None]"},
    ),
    Mutant(
        "The batch is mixed in place",
        "check_mixup_arguments",
        says="has changed its argument images",
        replace={
            "mixed = torch.lerp(images[partner], images, lam[:, None, None, None])": """
            partners = images[partner]
            mixed = images.copy_(torch.lerp(partners, images, lam[:, None, None, None]))
            """
        },
    ),
    Mutant(
        "mixup in a loop over the images",
        "check_mixup_loop",
        says="it loops over the images",
        replace={
            "mixed = torch.lerp(images[partner], images, lam[:, None, None, None])": """
            mixed = torch.stack([torch.lerp(images[partner[i]], images[i], lam[i]) for i in range(len(images))])
            """
        },
    ),
    Mutant(
        "The loop runs in NumPy",
        "check_mixup_loop",
        says="Stay with tensors",
        replace={
            "mixed = torch.lerp(images[partner], images, lam[:, None, None, None])": """
            pixels, shares, others = images.numpy(), lam.numpy(), partner.numpy()
            rows = [shares[i] * pixels[i] + (1 - shares[i]) * pixels[others[i]] for i in range(len(pixels))]
            mixed = torch.from_numpy(np.stack(rows))
            """
        },
    ),
    Mutant(
        "The share of the partner overwrites the own one",
        "check_targets",
        says="one assignment overwrites the other",
        replace={
            "own = F.one_hot(labels, classes).to(share.dtype)": "own, row = share.new_zeros(len(labels), classes), torch.arange(len(labels))",
            "return torch.lerp(own[partner], own, share[:, None])": """
            own[row, labels] = share
            own[row, labels[partner]] = 1 - share
            return own
            """,
        },
    ),
    Mutant(
        "The own share overwrites that of the partner",
        "check_targets",
        says="one assignment overwrites the other",
        replace={
            "own = F.one_hot(labels, classes).to(share.dtype)": "own, row = share.new_zeros(len(labels), classes), torch.arange(len(labels))",
            "return torch.lerp(own[partner], own, share[:, None])": """
            own[row, labels[partner]] = 1 - share
            own[row, labels] = share
            return own
            """,
        },
    ),
    Mutant(
        "The partner is taken as a class",
        "check_targets",
        says="not classes",
        replace={
            "return torch.lerp(own[partner], own, share[:, None])": "return torch.lerp(F.one_hot(partner % classes, classes).to(share.dtype), own, share[:, None])",
        },
    ),
    # -- cutmix
    Mutant(
        "One box for the whole batch",
        "check_boxes",
        says="All images have the box of the first one",
        replace={
            "(position >= first[:, None]) & (position < last[:, None])": "(position >= first[:1, None]) & (position < last[:1, None])"
        },
        also=["check_wide"],
    ),
    Mutant(
        "Height and width are exchanged",
        "check_boxes",
        says="The axes are exchanged",
        replace={"centres[:, axis] * size": "centres[:, 1 - axis] * size"},
        also=["check_wide"],
    ),
    Mutant(
        "The side has the share of the area",
        "check_boxes",
        says="the side is sqrt(1 - lam)",
        replace={"(1 - lam).sqrt(), []": "1 - lam, []"},
        also=["check_wide"],
    ),
    Mutant(
        "The box includes its last pixel",
        "check_boxes",
        says="one pixel too many",
        replace={"position < last[:, None]": "position <= last[:, None]"},
        also=["check_wide"],
    ),
    Mutant(
        "The edges are rounded down",
        "check_boxes",
        says="round them to the nearest pixel",
        replace={
            "(centre - half).round(), (centre + half).round()": "(centre - half).floor(), (centre + half).floor()"
        },
        also=["check_wide"],
    ),
    Mutant(
        "The whole side lies on each side of the centre",
        "check_boxes",
        says="half of its side lies on each side",
        replace={"side * size / 2": "side * size"},
        also=["check_wide"],
    ),
    Mutant(
        "The box has the share lam",
        "check_boxes",
        says="The box has the share lam of the area",
        replace={"(1 - lam).sqrt(), []": "lam.sqrt(), []"},
        also=["check_wide"],
    ),
    Mutant(
        "The box ends before the last pixel of the image",
        "check_boxes",
        says="never in a box",
        replace={"(centre + half).round()\n": "(centre + half).round().clamp(max=size - 1)\n"},
        also=["check_wide"],
    ),
    Mutant(
        "The image and its partner are exchanged",
        "check_boxes",
        says="The images are exchanged",
        replace={
            "mixed = torch.where(box[:, None], images[partner], images)": "mixed = torch.where(box[:, None], images, images[partner])"
        },
        also=["check_true_area", "check_wide"],
    ),
    Mutant(
        "An index with a mask",
        "check_cutmix_loop",
        says="An index with a mask",
        replace={
            "mixed = torch.where(box[:, None], images[partner], images)": """
            mixed, chosen = images.clone(), box[:, None].expand_as(images)
            mixed[chosen] = images[partner][chosen]
            """
        },
    ),
    Mutant(
        "The weight is lam, although the border cuts the box off",
        "check_true_area",
        says="as if the border cut nothing off",
        replace={
            "soft_targets(labels, partner, kept, classes)": "soft_targets(labels, partner, lam, classes)"
        },
    ),
    Mutant(
        "CutMix gives the own label the share of the box",
        "check_true_area",
        says="are exchanged",
        replace={"kept = 1 - box.to(lam.dtype).mean((1, 2))": "kept = box.to(lam.dtype).mean((1, 2))"},
    ),
    Mutant(
        "The targets of CutMix are always float32",
        "check_true_area",
        says="torch.float64",
        replace={"kept = 1 - box.to(lam.dtype).mean((1, 2))": "kept = 1 - box.float().mean((1, 2))"},
    ),
    Mutant(
        "The boxes are pasted into the images that were given",
        "check_cutmix_arguments",
        says="has changed its argument images",
        replace={
            "mixed = torch.where(box[:, None], images[partner], images)": "mixed = images.copy_(torch.where(box[:, None], images[partner], images))"
        },
    ),
    Mutant(
        "A loop over the images, with slices",
        "check_cutmix_loop",
        says="it loops over the images",
        answer="""
        def cutmix(images, labels, partner, lam, centres, classes):
            mixed, kept = images.clone(), torch.ones_like(lam)
            height, width = images.shape[-2:]
            for i in range(len(images)):
                half = (1 - lam[i]).sqrt() / 2
                top, bottom = (max(0, int((centres[i, 0] * height + sign * half * height).round())) for sign in (-1, 1))
                left, right = (max(0, int((centres[i, 1] * width + sign * half * width).round())) for sign in (-1, 1))
                mixed[i, :, top:bottom, left:right] = images[partner[i], :, top:bottom, left:right]
                kept[i] = 1 - (min(bottom, height) - top) * (min(right, width) - left) / (height * width)
            return mixed, soft_targets(labels, partner, kept, classes)
        """,
    ),
    Mutant(
        "The area of the box is that before the border cuts it off",
        "check_true_area",
        says="counts pixels outside of the image",
        replace={
            "position = torch": """
            areas = (last - first) * (areas if axis else 1)
            position = torch
            """,
            "kept = 1 - box.to(lam.dtype).mean((1, 2))": "kept = 1 - areas / (images.shape[-2] * images.shape[-1])",
        },
    ),
    Mutant(
        "The first edge is rounded down",
        "check_boxes",
        says="The first edges are rounded down",
        replace={
            "(centre - half).round()": "(centre - half).floor()",
        },
        also=["check_wide"],
    ),
    Mutant(
        "Centre and half are rounded apart",
        "check_boxes",
        says="The centre and the half of the side are rounded",
        replace={
            "first, last = (centre - half)": """
            centre, half = centre.round(), half.round()
            first, last = (centre - half)
            """,
        },
        also=["check_wide"],
    ),
    # -- weights
    Mutant(
        "The weights are the sizes of the classes",
        "check_weights",
        says="grow with the size of the class",
        replace={"1 / labels.bincount()[labels].double()": "labels.bincount()[labels].double()"},
    ),
    Mutant(
        "A weight for each class, not for each sample",
        "check_weights",
        says="one for each sample",
        replace={"1 / labels.bincount()[labels].double()": "1 / labels.bincount().clamp(min=1).double()"},
    ),
    Mutant(
        "The precision instead of the recall",
        "check_recall",
        says="This is the precision",
        replace={"(predicted[labels == label] == label)": "(labels[predicted == label] == label)"},
    ),
    Mutant(
        "The accuracy instead of the recall",
        "check_recall",
        says="This is the accuracy",
        replace={"(predicted[labels == label] == label)": "(predicted == labels)"},
    ),
    Mutant(
        "Whether a sample is of the class",
        "check_recall",
        says="samples of other classes that are not taken for it",
        replace={
            "(predicted[labels == label] == label)": "((predicted == label) == (labels == label))",
        },
    ),
    # -- scaling
    Mutant(
        "The statistics hold the variance",
        "check_statistics",
        says="keep the sum of the squared distances",
        answer="""
        def statistics(chunk):
            values = chunk.double()
            mean = values.mean(0)
            return len(values), mean, (values - mean).square().mean(0)

        def scaled(train_chunks, test):
            rows = torch.cat(train_chunks).double()
            mean, std = rows.mean(0), rows.std(0, correction=0)
            return torch.where(std > 1e-10 * mean.abs(), (test.double() - mean) / std, 0.0).to(test.dtype)
        """,
        also=["check_large_mean"],
    ),
    Mutant(
        "The statistics have the dtype of the chunk",
        "check_statistics",
        says="torch.float32",
        replace={"values = chunk.double()": "values = chunk"},
    ),
    Mutant(
        "The mean of the two means",
        "check_merged",
        says="a larger part counts more",
        replace={
            "mean = a[1] + distance * (b[0] / count)": "mean = (a[1] + b[1]) / 2",
            "total = merged(total, statistics(chunk))": "total = statistics(torch.cat(train_chunks))",
        },
    ),
    Mutant(
        "The squares are only added",
        "check_merged",
        says="the distance between the two means is missing",
        replace={
            " + distance.square() * (a[0] * b[0] / count)": "",
            "total = merged(total, statistics(chunk))": "total = statistics(torch.cat(train_chunks))",
        },
    ),
    Mutant(
        "The sum of the squares, minus n times the square of the mean",
        "check_large_mean",
        says="loses its digits",
        replace={
            "(values - mean).square().sum(0)": "values.square().sum(0) - len(values) * mean.square()",
            "std > 1e-10 * mean.abs()": "std > 1e-6 * mean.abs()",
        },
    ),
    Mutant(
        "The test set is scaled with its own statistics",
        "check_training_only",
        says="those of the test set. This is a data leak",
        replace={
            "count, mean, squares = total": "count, mean, squares = statistics(test)",
            "std > 1e-10 * mean.abs()": "(total[2] / total[0]).sqrt() > 1e-10 * total[1].abs()",
        },
        also=["check_constant", "check_threshold"],
    ),
    Mutant(
        "The test set is in the statistics",
        "check_training_only",
        says="The test set is in the statistics",
        replace={
            "count, mean, squares = total": "count, mean, squares = merged(total, statistics(test))",
            "std > 1e-10 * mean.abs()": "(total[2] / total[0]).sqrt() > 1e-10 * total[1].abs()",
        },
        also=["check_constant", "check_threshold"],
    ),
    Mutant(
        "The variance is divided by n - 1",
        "check_training_only",
        says="divided by n - 1",
        replace={"(squares / count).sqrt()": "(squares / (count - 1)).sqrt()"},
        also=["check_constant", "check_threshold"],
    ),
    Mutant(
        "A constant feature is divided by its standard deviation",
        "check_constant",
        says="the division has no meaning",
        replace={
            "torch.where(std > 1e-10 * mean.abs(), (test.double() - mean) / std, 0.0)": "((test.double() - mean) / std.clamp(min=1e-12))"
        },
        also=["check_threshold"],
    ),
    Mutant(
        "Only a standard deviation of exactly 0 is constant",
        "check_threshold",
        says="not with 0",
        replace={"std > 1e-10 * mean.abs()": "std > 0"},
    ),
    Mutant(
        "The threshold does not depend on the mean",
        "check_threshold",
        says="not with a fixed number",
        replace={"std > 1e-10 * mean.abs()": "std > 1e-10"},
    ),
    # -- stopping
    Mutant(
        "A better loss does not begin a new count",
        "check_patience",
        says="begins a new count",
        replace={"self.best, self.since = loss, 0\n": "self.best = loss\n"},
    ),
    Mutant(
        "A loss is compared with the previous one, not with the best",
        "check_patience",
        says="*best*",
        replace={"self.since += 1": "self.since += 1\nself.best = loss if loss > self.best else self.best"},
    ),
    Mutant(
        "It stops one loss too late",
        "check_patience",
        says="expected True",
        replace={"self.since >= self.patience": "self.since > self.patience"},
        also=["check_min_delta", "check_level", "check_nan"],
    ),
    Mutant(
        "It stops only with the loss that reaches the patience",
        "check_patience",
        says="The answer stays True",
        replace={"self.since >= self.patience": "self.since == self.patience"},
    ),
    Mutant(
        "The count begins again after True",
        "check_patience",
        says="The answer stays True",
        replace={
            "return self.since >= self.patience": """
            stop = self.since >= self.patience
            self.since = 0 if stop else self.since
            return stop
            """
        },
    ),
    Mutant(
        "An equal loss counts as better",
        "check_min_delta",
        says="one that is equal to it is not better",
        replace={"loss < self.best - self.min_delta": "loss + self.min_delta <= self.best"},
    ),
    Mutant(
        "min_delta is ignored",
        "check_min_delta",
        says="below best - min_delta",
        replace={"loss < self.best - self.min_delta": "loss < self.best"},
        also=["check_level"],
    ),
    Mutant(
        "Every small improvement lowers the best loss",
        "check_min_delta",
        says="the last loss that was better",
        replace={"self.since += 1": "self.since += 1\nself.best = min(self.best, loss)"},
    ),
    Mutant(
        "NaN counts as better",
        "check_nan",
        says="NaN counts as not better",
        replace={"if loss < self.best - self.min_delta:": "if not loss >= self.best - self.min_delta:"},
    ),
    Mutant(
        "The weights are kept without a copy",
        "check_best_weights",
        says="Keep copies",
        replace={"copy.deepcopy(self.model.state_dict())": "self.model.state_dict()"},
    ),
    Mutant(
        "The first weights are kept",
        "check_best_weights",
        says="the best loss came in call",
        replace={
            "self.weights = copy.deepcopy(self.model.state_dict())": "self.weights = self.weights or copy.deepcopy(self.model.state_dict())"
        },
    ),
    Mutant(
        "min_delta is a share of the best loss",
        "check_level",
        says="and not below best * (1 - min_delta)",
        replace={
            "loss < self.best - self.min_delta": "loss < self.best * (1 - self.min_delta)",
        },
    ),
    Mutant(
        "min_delta is a share of the absolute value of the best loss",
        "check_level",
        says="and not below best * (1 - min_delta)",
        replace={
            "loss < self.best - self.min_delta": "loss < (self.best - self.min_delta * abs(self.best) if self.best < math.inf else math.inf)",
        },
    ),
    Mutant(
        "restore names another model",
        "check_best_weights",
        says="only names another model",
        replace={
            "copy.deepcopy(self.model.state_dict())": "copy.deepcopy(self.model)",
            "self.model.load_state_dict(self.weights)": "self.model = self.weights",
        },
    ),
    Mutant(
        "The buffers are not kept",
        "check_best_weights",
        says="parameters() has no buffers",
        replace={
            "copy.deepcopy(self.model.state_dict())": "[each.detach().clone() for each in self.model.parameters()]",
            "self.model.load_state_dict(self.weights)": """
            for each, kept in zip(self.model.parameters(), self.weights):
                each.data.copy_(kept)
            """,
        },
    ),
    # -- resume
    Mutant(
        "Every epoch has the same order",
        "check_epochs",
        says="two epochs have the same order",
        replace={"1_000_003 * self.seed + self.epoch": "self.seed"},
    ),
    Mutant(
        "Seed and epoch are added",
        "check_epochs",
        says="seed + epoch mixes them",
        replace={"1_000_003 * self.seed + self.epoch": "self.seed + self.epoch"},
    ),
    Mutant(
        "Ten times the seed and the epoch are added",
        "check_epochs",
        says="seed + epoch mixes them",
        replace={"1_000_003 * self.seed + self.epoch": "10 * self.seed + self.epoch"},
    ),
    Mutant(
        "The position stays in a global and is not in the state",
        "check_resumed",
        says="begins the epoch again",
        replace={
            'return {"epoch": self.epoch, "used": self.used,': """
            globals()["kept"] = self.epoch, self.used
            return {"epoch": self.epoch,
            """,
            'self.epoch, self.used = state["epoch"], state["used"]': 'self.epoch, self.used = globals().get("kept", (state["epoch"], 0))',
        },
        also=["check_prefetched", "check_end_of_epoch", "check_first_epoch"],
    ),
    Mutant(
        "The order comes from the global generator",
        "check_resumed",
        says="the order depends on more than seed and epoch",
        replace={"torch.randperm(self.size, generator=of_epoch)": "torch.randperm(self.size)"},
        also=["check_global", "check_prefetched", "check_end_of_epoch", "check_first_epoch"],
    ),
    Mutant(
        "The position is not restored",
        "check_resumed",
        says="begins the epoch again",
        replace={'self.epoch, self.used = state["epoch"], state["used"]': 'self.epoch = state["epoch"]'},
        also=["check_prefetched", "check_end_of_epoch", "check_first_epoch"],
    ),
    Mutant(
        "The epoch is not restored",
        "check_resumed",
        says="sees other images from step",
        replace={'self.epoch, self.used = state["epoch"], state["used"]': 'self.used = state["used"]'},
        also=["check_prefetched", "check_end_of_epoch", "check_first_epoch"],
    ),
    Mutant(
        "The position counts the batches that the sampler has given out",
        "check_prefetched",
        says="Count the steps of the training",
        replace={
            "for indices in order.split(self.batch)[self.used :]:": """
            for indices in order.split(self.batch)[self.used :]:
                self.used += 1
            """,
            """
            self.used += 1
            if self.used == math.ceil(self.size / self.batch):
                self.epoch, self.used = self.epoch + 1, 0
            """: """
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps % math.ceil(self.size / self.batch) == 0:
                self.epoch, self.used = self.epoch + 1, 0
            """,
            'return {"epoch": self.epoch,': 'return {"steps": getattr(self, "steps", 0), "epoch": self.epoch,',
            'self.epoch, self.used = state["epoch"], state["used"]': 'self.epoch, self.used, self.steps = state["epoch"], state["used"], state["steps"]',
        },
        also=["check_end_of_epoch", "check_first_epoch"],
    ),
    Mutant(
        "The next epoch begins when the iterator ends",
        "check_end_of_epoch",
        says="Begin the next epoch in step_done",
        replace={
            """
            for indices in order.split(self.batch)[self.used :]:
                yield indices.tolist()
            """: """
            for indices in order.split(self.batch)[self.used :]:
                yield indices.tolist()
            self.epoch, self.used = self.epoch + 1, 0
            """,
            """
            if self.used == math.ceil(self.size / self.batch):
                self.epoch, self.used = self.epoch + 1, 0
            """: "",
        },
    ),
    Mutant(
        "The generator has no seed",
        "check_augmentation",
        says="another seed or none",
        replace={
            "self.generator = torch.Generator().manual_seed(seed)": "self.generator = torch.Generator()"
        },
    ),
    Mutant(
        "The state of the generator is not restored",
        "check_augmentation",
        says="the state lacks that of the generator",
        replace={'self.generator.set_state(state["generator"])': ""},
    ),
    Mutant(
        "Batches are tensors",
        "check_epochs",
        says="a list of Python integers",
        replace={
            "yield indices.tolist()": "yield indices",
        },
    ),
    Mutant(
        "Batches are arrays of NumPy",
        "check_epochs",
        says="a list of Python integers",
        replace={
            "yield indices.tolist()": "yield indices.numpy()",
        },
    ),
    Mutant(
        "Each epoch seeds the global generator",
        "check_global",
        says="from which the training draws too",
        replace={
            "of_epoch = torch.Generator().manual_seed(1_000_003": "torch.manual_seed(1_000_003",
            "torch.randperm(self.size, generator=of_epoch)": "torch.randperm(self.size)",
        },
    ),
    Mutant(
        "The state holds the generator itself",
        "check_resumed",
        says="keep generator.get_state()",
        replace={
            '"generator": self.generator.get_state()': '"generator": self.generator',
            'self.generator.set_state(state["generator"])': 'self.generator = state["generator"]',
        },
        also=[
            "check_prefetched",
            "check_end_of_epoch",
            "check_augmentation",
            "check_first_epoch",
        ],
    ),
    # -- ranges
    Mutant(
        "Ranks and workers have the same samples",
        "check_no_overlap",
        says="samples are read twice",
        replace={"(rank * per_rank + per_rank": "(per_rank"},
        also=["check_parts"],
    ),
    Mutant(
        "The last rank reads what is left over",
        "check_no_overlap",
        says="on each of",
        replace={
            "parts, begin = [], 0": """
            stop = sum(counts) if (rank, worker) == (world - 1, workers - 1) else stop
            parts, begin = [], 0
            """
        },
        also=["check_parts"],
    ),
    Mutant(
        "The parts of the workers are taken in the opposite order",
        "check_parts",
        says="reads",
        replace={
            "for place in (worker, worker + 1))": "for place in (workers - 1 - worker, workers - worker))"
        },
    ),
    # -- rand_augment
    Mutant(
        "Only the first round",
        "check_rounds",
        says="Only the first round",
        replace={"for choice in drawn:": "for choice in drawn[:1]:"},
        also=["check_groups"],
    ),
    Mutant(
        "RandAugment in a loop over the images",
        "check_groups",
        says="one call in each round",
        replace={
            """
            if len(group):
                images[group] = operation(images[group], magnitude)
            """: """
            for place in group:
                images[place : place + 1] = operation(images[place : place + 1], magnitude)
            """
        },
    ),
    Mutant(
        "Operations are called without images",
        "check_groups",
        says="one call in each round",
        replace={"if len(group):": "if True:"},
    ),
    Mutant(
        "The images that are given are changed",
        "check_augment_arguments",
        says="work on a copy",
        replace={"images = images.clone()": ""},
    ),
    Mutant(
        "Each round begins with the given images",
        "check_rounds",
        says="Only the last round is there",
        replace={
            "images[group] = operation(images[group], magnitude)": "images[group] = operation(given[group], magnitude)",
            "images = images.clone()": "given, images = images, images.clone()",
        },
    ),
]

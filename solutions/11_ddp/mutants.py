"""Planted mistakes of Distributed data parallelism, from hooks, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- replicate
    Mutant(
        "Only the parameters are sent",
        "check_buffers",
        says="module.parameters() has no buffers",
        replace={"[*module.parameters(), *module.buffers()]": "module.parameters()"},
    ),
    Mutant(
        "What is not trained is not sent",
        "check_frozen",
        says="a frozen parameter still has another value",
        replace={
            "[*module.parameters(), *module.buffers()]": """
            [*(parameter for parameter in module.parameters() if parameter.requires_grad), *module.buffers()]
            """,
        },
    ),
    Mutant(
        "Trained parameters are averaged over the ranks instead of copied from rank 0",
        "check_parameters",
        says="is the mean over the ranks: every rank should get the values of rank 0",
        answer="""
        def replicate(module):
            for parameter in module.parameters():
                if parameter.requires_grad:
                    dist.all_reduce(parameter.data)
                    parameter.data /= dist.get_world_size()
                else:
                    dist.broadcast(parameter.data, 0)
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)
        """,
    ),
    Mutant(
        "The tensors of state_dict are sent, in which some buffers are missing",
        "check_buffers",
        says="state_dict() leaves it out",
        replace={"[*module.parameters(), *module.buffers()]": "module.state_dict().values()"},
    ),
    # -- average
    Mutant(
        "The all-reduce averages, and the fp16 sum overflows",
        "check_half_precision",
        says="ReduceOp.AVG, which gloo has since PyTorch 2.8, adds first",
        replace={
            "parameter.grad /= dist.get_world_size()": "",
            "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)",
        },
    ),
    Mutant(
        "The division comes after the sum, and the fp16 sum overflows",
        "check_half_precision",
        says="divide before the all-reduce",
        replace={
            "parameter.grad /= dist.get_world_size()": """
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
            """,
            "dist.all_reduce(parameter.grad)": "",
        },
    ),
    Mutant(
        "Every rank collects the gradients of all others and takes their mean",
        "check_small_traffic",
        says="one all-reduce each is enough",
        replace={
            "dist.all_reduce(parameter.grad)": """
            found = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(found, parameter.grad)
            parameter.grad = sum(found)
            """,
        },
    ),
    Mutant(
        "The sum over three ranks or more is not divided",
        "check_mean",
        also=("check_small_traffic",),
        says="does not divide by the number of ranks",
        replace={
            "parameter.grad /= dist.get_world_size()": "parameter.grad /= min(2, dist.get_world_size())",
            "dist.all_reduce(parameter.grad)": """
            dist.all_reduce(parameter.grad)
            if dist.get_world_size() > 2:
                parameter.grad *= 2
            """,
        },
    ),
    Mutant(
        "With more than two ranks, every rank collects the gradients of all others",
        "check_small_traffic",
        says="one all-reduce each is enough",
        replace={
            "dist.all_reduce(parameter.grad)": """
            if dist.get_world_size() == 2:
                dist.all_reduce(parameter.grad)
                continue
            found = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(found, parameter.grad)
            parameter.grad = sum(found)
            """,
        },
    ),
    # -- buckets
    Mutant(
        "The first bucket stays empty if the first gradient is larger than the limit",
        "check_limit",
        says="a bucket is empty",
        also=("check_only_large",),
        replace={
            "buckets, held = [], 0": "buckets, held = [[]], 0",
            "if not buckets or held + nbytes[i] > limit:": "if held + nbytes[i] > limit:",
        },
    ),
    Mutant(
        "A bucket is closed when it has exceeded the limit already",
        "check_limit",
        says="only a single gradient may exceed it",
        replace={
            "buckets, held = [], 0": "buckets, held = [[]], 0",
            "if not buckets or held + nbytes[i] > limit:": "if held >= limit:",
        },
    ),
    Mutant(
        "Buckets are filled in the order of forward",
        "check_order",
        says="that of the last parameter arrives first",
        replace={"for i in reversed(range(len(nbytes))):": "for i in range(len(nbytes)):"},
    ),
    Mutant(
        "A gradient that fills a bucket exactly begins a new one",
        "check_exact_fit",
        says="fill the limit of",
        replace={
            "if not buckets or held + nbytes[i] > limit:": """
            if not buckets or (held and held + nbytes[i] >= limit):
            """,
        },
    ),
    Mutant(
        "Three gradients are enough for a bucket",
        "check_full",
        says="still fits within",
        replace={
            "if not buckets or held + nbytes[i] > limit:": """
            if not buckets or held + nbytes[i] > limit or len(buckets[-1]) == 3:
            """,
        },
    ),
    # -- overlap
    Mutant(
        "finish starts no bucket",
        "check_unused",
        says="finish() should start the buckets that have not started",
        also=("check_no_sync",),
        replace={
            """
            while len(self.works) < len(self.buckets):
                self.send()
            """: "",
        },
    ),
    Mutant(
        "Arrivals are never forgotten",
        "check_averaged",
        says="does finish() also reset which gradients have arrived?",
        also=("check_unused",),
        replace={
            """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
                for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                    self.trained[i].grad = average.view_as(self.trained[i])
            self.arrived, self.works = set(), []
            """: """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
                for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                    self.trained[i].grad = average.view_as(self.trained[i])
            self.works = []
            """,
        },
    ),
    Mutant(
        "The all-reduce of a bucket averages, and the fp16 sum overflows",
        "check_averaged",
        says="ReduceOp.AVG, which gloo has since PyTorch 2.8, adds first",
        replace={
            "for gradient in gradients]) / dist.get_world_size()": "for gradient in gradients])",
            "dist.all_reduce(flat, async_op=True)": "dist.all_reduce(flat, dist.ReduceOp.AVG, async_op=True)",
        },
    ),
    Mutant(
        "All buckets are sent in finish",
        "check_during_backward",
        says="complete buckets had been sent",
        replace={
            """
            while len(self.works) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.works)]):
                self.send()
            """: "",
        },
    ),
    Mutant(
        "Backward sends each bucket with a blocking all-reduce",
        "check_during_backward",
        says="use async_op=True, and call wait() in finish",
        replace={
            """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
            """: "for bucket, (_, flat) in zip(self.buckets, self.works):",
            "self.works.append((dist.all_reduce(flat, async_op=True), flat))": """
            dist.all_reduce(flat)
            self.works.append((None, flat))
            """,
        },
    ),
    Mutant(
        "Backward waits for each bucket as soon as it is sent",
        "check_during_backward",
        says="wait() belongs in finish",
        replace={
            """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
            """: "for bucket, (_, flat) in zip(self.buckets, self.works):",
            "self.works.append((dist.all_reduce(flat, async_op=True), flat))": """
            work = dist.all_reduce(flat, async_op=True)
            work.wait()
            self.works.append((None, flat))
            """,
        },
    ),
    Mutant(
        "A bucket is sent as one message for each gradient",
        "check_bucket_traffic",
        says="concatenate the gradients of a bucket",
        replace={
            """
            work.wait()
            for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
            """: """
            for i, each, average in zip(bucket, work, flat):
                each.wait()
            """,
            "flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()": """
            parts = [gradient.flatten() / dist.get_world_size() for gradient in gradients]
            """,
            "self.works.append((dist.all_reduce(flat, async_op=True), flat))": """
            self.works.append(([dist.all_reduce(part, async_op=True) for part in parts], parts))
            """,
        },
    ),
    Mutant(
        "A rank that did not use a parameter sends zeros, but leaves its own gradient None",
        "check_unused",
        says="this rank needs the average too",
        replace={
            "self.trained[i].grad = average.view_as(self.trained[i])": """
            if self.trained[i].grad is not None:
                self.trained[i].grad = average.view_as(self.trained[i])
            """,
        },
    ),
    Mutant(
        "With more than two ranks a bucket is sent as soon as it is complete, whatever came before",
        "check_same_order",
        says="was added to that of another parameter",
        answer="""
        class DataParallel(nn.Module):
            def __init__(self, module, bucket_bytes=1024 * KIB):
                super().__init__()
                replicate(module)
                self.module, self.sync = module, True
                self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
                self.buckets = assign_buckets([parameter.nbytes for parameter in self.trained], bucket_bytes)
                self.arrived, self.works = set(), {}
                for i, parameter in enumerate(self.trained):
                    parameter.register_post_accumulate_grad_hook(lambda _, i=i: self.on_gradient(i))

            def forward(self, *inputs):
                return self.module(*inputs)

            @contextlib.contextmanager
            def no_sync(self):
                self.sync = False
                try:
                    yield
                finally:
                    self.sync = True

            def on_gradient(self, i):
                if not self.sync:
                    return
                self.arrived.add(i)
                for number, bucket in enumerate(self.buckets):
                    complete = self.arrived.issuperset(bucket)
                    if not complete and dist.get_world_size() < 3:
                        return
                    if complete and number not in self.works:
                        self.send(number)

            def finish(self):
                for number, bucket in enumerate(self.buckets):
                    if number not in self.works:
                        self.send(number)
                    work, flat = self.works[number]
                    work.wait()
                    for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                        self.trained[i].grad = average.view_as(self.trained[i])
                self.arrived, self.works = set(), {}

            def send(self, number):
                members = [self.trained[i] for i in self.buckets[number]]
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
                flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
                self.works[number] = (dist.all_reduce(flat, async_op=True), flat)
        """,
    ),
    Mutant(
        "The average is divided after the sum, which overflows in fp16",
        "check_averaged",
        says="divide before the all-reduce",
        replace={
            "flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()": """
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            """,
            "self.trained[i].grad = average.view_as(self.trained[i])": """
            self.trained[i].grad = average.view_as(self.trained[i]) / dist.get_world_size()
            """,
        },
    ),
    Mutant(
        "With more than two ranks the average is divided after the sum, which overflows in fp16",
        "check_averaged",
        says="divide before the all-reduce",
        replace={
            "flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()": """
            world = dist.get_world_size()
            flat = torch.cat([gradient.flatten() for gradient in gradients]) / (world if world < 3 else 1)
            """,
            "self.trained[i].grad = average.view_as(self.trained[i])": """
            world = dist.get_world_size()
            self.trained[i].grad = average.view_as(self.trained[i]) / (1 if world < 3 else world)
            """,
        },
    ),
    Mutant(
        "With more than two ranks a parameter that a rank did not use keeps None as gradient",
        "check_unused",
        says="this rank needs the average too",
        replace={
            "self.trained[i].grad = average.view_as(self.trained[i])": """
            if self.trained[i].grad is not None or dist.get_world_size() < 3:
                self.trained[i].grad = average.view_as(self.trained[i])
            """,
        },
    ),
    Mutant(
        "From the third step on, every bucket is reduced twice",
        "check_averaged",
        says="a bucket is reduced more than once",
        replace={
            "self.works.append((dist.all_reduce(flat, async_op=True), flat))": """
            self.sent = getattr(self, "sent", 0) + 1
            if self.sent > 2 * len(self.buckets):
                dist.all_reduce(flat)
            self.works.append((dist.all_reduce(flat, async_op=True), flat))
            """,
        },
    ),
    Mutant(
        "The state is not reset after the second step",
        "check_averaged",
        says="in step 2 the gradient of parameter 0 is the average of step 1: finish() should reset the state",
        replace={
            """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
                for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                    self.trained[i].grad = average.view_as(self.trained[i])
            self.arrived, self.works = set(), []
            """: """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
                for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                    self.trained[i].grad = average.view_as(self.trained[i])
            self.passes = getattr(self, "passes", 0) + 1
            if self.passes == 1:
                self.arrived, self.works = set(), []
            """,
        },
    ),
    Mutant(
        "The hooks ignore no_sync",
        "check_no_sync",
        says="inside no_sync(): while self.sync is False, return at once",
        replace={
            """
            if not self.sync:
                return
            """: "",
        },
    ),
    Mutant(
        "Inside no_sync every rank shows its gradients to the others",
        "check_no_sync",
        says="inside no_sync(): while self.sync is False, return at once",
        replace={
            """
            if not self.sync:
                return
            """: """
            if not self.sync:
                found = [torch.empty_like(self.trained[i].grad) for _ in range(dist.get_world_size())]
                dist.all_gather(found, self.trained[i].grad)
                return
            """,
        },
    ),
    Mutant(
        "Arrivals inside no_sync are recorded, so the next pass sends its buckets too early",
        "check_no_sync",
        says="Record no arrival while self.sync is False",
        replace={
            """
            if not self.sync:
                return
            self.arrived.add(i)
            """: """
            self.arrived.add(i)
            if not self.sync:
                return
            """,
        },
    ),
    Mutant(
        "Zeros are sent for a parameter that the last pass did not use, although it has a gradient of earlier passes",
        "check_no_sync",
        says="Only a .grad that is None counts as zeros",
        replace={
            "members = [self.trained[i] for i in self.buckets[len(self.works)]]": """
            bucket = self.buckets[len(self.works)]
            members = [self.trained[i] for i in bucket]
            """,
            "gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]": """
            gradients = [p.grad if i in self.arrived else torch.zeros_like(p) for i, p in zip(bucket, members)]
            """,
        },
    ),
    Mutant(
        "Arrivals are forgotten only when all gradients have arrived",
        "check_unused",
        says="does finish() also reset which gradients have arrived?",
        replace={
            """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
                for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                    self.trained[i].grad = average.view_as(self.trained[i])
            self.arrived, self.works = set(), []
            """: """
            for bucket, (work, flat) in zip(self.buckets, self.works):
                work.wait()
                for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                    self.trained[i].grad = average.view_as(self.trained[i])
            self.works = []
            if len(self.arrived) == len(self.trained):
                self.arrived = set()
            """,
        },
    ),
    # -- accumulate
    Mutant(
        "All backward passes run inside no_sync",
        "check_last_pass",
        says="run the last backward pass outside no_sync()",
        answer="""
        def accumulate(model, losses):
            with model.no_sync():
                for loss in losses:
                    (loss() / len(losses)).backward()
            model.finish()
        """,
    ),
    Mutant(
        "no_sync is forgotten",
        "check_accumulated",
        also=("check_last_pass",),
        says="backward passes run outside no_sync()",
        replace={
            """
            with model.no_sync():
                for loss in losses[:-1]:
                    (loss() / len(losses)).backward()
            """: """
            for loss in losses[:-1]:
                (loss() / len(losses)).backward()
            """,
        },
    ),
    Mutant(
        "finish is forgotten",
        "check_accumulated",
        also=("check_last_pass",),
        says="call finish(), which averages",
        replace={"model.finish()": ""},
    ),
    Mutant(
        "The gradients of the micro-batches are added and not averaged",
        "check_accumulated",
        also=("check_last_pass",),
        says="are added, so divide each loss by their number",
        replace={
            "(loss() / len(losses)).backward()": "loss().backward()",
            "(losses[-1]() / len(losses)).backward()": "losses[-1]().backward()",
        },
    ),
    Mutant(
        "The gradients are averaged after every micro-batch",
        "check_accumulated",
        says="all backward passes except the last run inside no_sync()",
        answer="""
        def accumulate(model, losses):
            for loss in losses:
                (loss() / len(losses)).backward()
                model.finish()
        """,
    ),
    Mutant(
        "After each micro-batch the ranks show one another their gradients",
        "check_accumulated",
        says="one all-reduce of the bucket is enough, but your code also calls: all_gather",
        replace={
            "(loss() / len(losses)).backward()": """
            (loss() / len(losses)).backward()
            for parameter in model.module.parameters():
                found = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
                dist.all_gather(found, parameter.grad)
            """,
        },
    ),
    # -- sampler
    Mutant(
        "The seed of the global random generator is set",
        "check_own_generator",
        says="a separate torch.Generator",
        replace={
            """
            order = torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch)).tolist()
            """: """
            torch.manual_seed(1_000_003 * seed + epoch)
            order = torch.randperm(length).tolist()
            """,
        },
    ),
    Mutant(
        "Each rank draws its own permutation",
        "check_everyone_once",
        says="Its seed depends on seed and epoch, not on rank",
        replace={
            """
            order = torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch)).tolist()
            """: """
            generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * rank + epoch)
            order = torch.randperm(length, generator=generator).tolist()
            """,
        },
    ),
    Mutant(
        "The epoch is not part of the seed",
        "check_shuffled",
        says="the same samples in epochs 0 and 1",
        replace={"1_000_003 * seed + epoch": "seed"},
    ),
    Mutant(
        "The permutation is extended once by its beginning, which is not enough for few samples",
        "check_fewer_than_ranks",
        says="repeat the samples as often as needed",
        replace={
            """
            each = -(-length // world)
            while len(order) < each * world:
                order += order[: each * world - len(order)]
            """: "order += order[: -length % world]",
        },
    ),
    Mutant(
        "The samples that cannot be divided are left out",
        "check_everyone_once",
        says="no rank sees",
        answer="""
        def rank_samples(length, rank, world, epoch, seed=0):
            generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
            order = torch.randperm(length, generator=generator).tolist()
            each = max(1, length // world)
            order = (order * world)[: max(each * world, length)]
            return order[rank * each : (rank + 1) * each]
        """,
    ),
    Mutant(
        "Each rank takes the first part of the permutation",
        "check_everyone_once",
        says="all ranks see the same samples",
        replace={"return order[rank::world]": "return order[:each]"},
    ),
    # -- metrics
    Mutant(
        "The accuracies of the ranks are averaged",
        "check_rate",
        says="the mean of the ranks' accuracies",
        answer="""
        def global_accuracy(logits, labels):
            right = (logits.argmax(1) == labels).sum()
            pair = torch.stack([right / max(1, len(labels)), torch.tensor(float(len(labels) > 0))])
            dist.all_reduce(pair)
            return (pair[0] / pair[1]).item()
        """,
    ),
    Mutant(
        "Each rank's accuracy is weighted by its share, and 0 / 0 on a rank without samples",
        "check_empty_rank",
        says="its own accuracy is 0 / 0",
        answer="""
        def global_accuracy(logits, labels):
            rate = (logits.argmax(1) == labels).float().mean()
            pair = torch.stack([rate * len(labels), torch.tensor(float(len(labels)))])
            dist.all_reduce(pair)
            return (pair[0] / pair[1]).item()
        """,
    ),
    Mutant(
        "There are two all-reduces of one number each",
        "check_one_message",
        says="into one tensor",
        answer="""
        def global_accuracy(logits, labels):
            right, count = (logits.argmax(1) == labels).sum(), torch.tensor(len(labels))
            dist.all_reduce(right)
            dist.all_reduce(count)
            return (right / count).item()
        """,
    ),
    Mutant(
        "With more than two ranks, each count travels alone",
        "check_one_message",
        says="into one tensor",
        answer="""
        def global_accuracy(logits, labels):
            counts = torch.tensor([(logits.argmax(1) == labels).sum(), len(labels)])
            for part in counts.split(2 if dist.get_world_size() <= 2 else 1):
                dist.all_reduce(part)
            return (counts[0] / counts[1]).item()
        """,
    ),
    # -- moments
    Mutant(
        "The mean of no samples is 0 / 0",
        "check_rank_without_samples",
        says="is not a number: a rank has no sample",
        replace={
            "total = x.sum(0)": """
            weighted = x.mean(0) * count
            dist.all_reduce(weighted)
            """,
            """
            dist.all_reduce(total)
            mean = total / count
            """: "mean = weighted / count",
        },
    ),
    Mutant(
        "The variance is the weighted mean of the ranks' variances",
        "check_moments",
        says="it lacks the distances between the ranks' means",
        answer="""
        def global_moments(x):
            count, total = torch.tensor(float(len(x))), x.sum(0)
            own = x.mean(0) if len(x) else total
            squares = (x - own).square().sum(0)
            for tensor in (count, total, squares):
                dist.all_reduce(tensor)
            return total / count, squares / count
        """,
    ),
    Mutant(
        "The samples themselves are gathered",
        "check_samples_stay",
        says="sums of each channel are enough",
        answer="""
        def global_moments(x):
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(counts, torch.tensor([len(x)]))
            longest = int(max(counts))
            padded = torch.cat([x, x.new_zeros(longest - len(x), x.shape[1])])
            found = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(found, padded)
            samples = torch.cat([each[: int(count)] for each, count in zip(found, counts)])
            return samples.mean(0), samples.var(0, correction=0)
        """,
    ),
    Mutant(
        "The variance is E[x^2] - E[x]^2, which cancels",
        "check_large_mean",
        says="loses its digits in fp32",
        answer="""
        def global_moments(x):
            sums = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])
            dist.all_reduce(sums)
            mean, square = (sums[:-1] / sums[-1]).chunk(2)
            return mean, square - mean.square()
        """,
    ),
]

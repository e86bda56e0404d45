"""Backward waits for every bucket, by another way."""

QUESTION = "overlap"
LOSES = 2
FAILS = "check_during_backward"
SAYS = "wait() belongs in finish, not in a hook"


class DataParallel(nn.Module):
    def __init__(self, module, bucket_bytes=1024 * KIB):
        super().__init__()
        replicate(module)
        self.module, self.sync = module, True
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = assign_buckets([parameter.nbytes for parameter in self.trained], bucket_bytes)
        self.arrived, self.works = set(), []
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
        while len(self.works) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.works)]):
            self.send()

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for bucket, (_, flat) in zip(self.buckets, self.works):
            for i, average in zip(bucket, flat.split([self.trained[i].numel() for i in bucket])):
                self.trained[i].grad = average.view_as(self.trained[i])
        self.arrived, self.works = set(), []

    def send(self):
        members = [self.trained[i] for i in self.buckets[len(self.works)]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
        work = dist.all_reduce(flat, async_op=True)
        work.wait()
        self.works.append((None, flat))

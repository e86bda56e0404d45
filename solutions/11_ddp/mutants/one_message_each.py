"""A bucket is sent as one message for each gradient."""

QUESTION = "overlap"
LOSES = 1
FAILS = "check_bucket_traffic"
SAYS = "cat the gradients of a bucket"


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
        for bucket, (work, flat) in zip(self.buckets, self.works):
            for i, each, average in zip(bucket, work, flat):
                each.wait()
                self.trained[i].grad = average.view_as(self.trained[i])
        self.arrived, self.works = set(), []

    def send(self):
        members = [self.trained[i] for i in self.buckets[len(self.works)]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        parts = [gradient.flatten() / dist.get_world_size() for gradient in gradients]
        self.works.append(([dist.all_reduce(part, async_op=True) for part in parts], parts))

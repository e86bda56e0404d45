# Right answers that look unlike the solution.

# == lists_first: reads all spans into lists first

# %% nesting
def parents(spans: list[dict]) -> list[int | None]:
    begins, ends = [span["begin"] for span in spans], [span["end"] for span in spans]
    found: list[int | None] = [None] * len(spans)
    for track in {span["track"] for span in spans}:
        open_spans: list[int] = []
        for number in (number for number, span in enumerate(spans) if span["track"] == track):
            open_spans = open_spans if not open_spans else [n for n in open_spans if ends[n] > begins[number]]
            found[number] = open_spans[-1] if open_spans else None
            open_spans.append(number)
    return found


def self_times(spans: list[dict]) -> list[float]:
    within = [0.0] * len(spans)
    for span, parent in zip(spans, parents(spans)):
        if parent is not None:
            within[parent] += span["end"] - span["begin"]
    return [span["end"] - span["begin"] - inner for span, inner in zip(spans, within)]


# == batches_in_advance: makes all batches in __init__


# %% batches
class Batches:
    def __init__(self, images, labels, size, seed):
        std, mean = torch.std_mean(images, 0)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        self.all = [((images[chosen] - mean) / std, labels[chosen]) for chosen in order.split(size)]

    def __iter__(self):
        return iter(self.all)


# == chosen_only: keeps the statistics, and standardises the chosen images


# %% batches
class Batches:
    def __init__(self, images, labels, size, seed):
        self.given = images.clone(), labels
        self.mean, self.scale = images.mean(0, keepdim=True), images.var(0, keepdim=True).rsqrt()
        self.size, self.seed = size, seed

    def __iter__(self):
        order = torch.randperm(len(self.given[0]), generator=torch.Generator().manual_seed(self.seed))
        for first in range(0, len(order), self.size):
            images, labels = (each.index_select(0, order[first : first + self.size]) for each in self.given)
            yield images.sub_(self.mean).mul_(self.scale), labels


# == through_a_loader: a DataLoader makes the batches

# %% batches
from torch.utils.data import DataLoader, TensorDataset


class Batches:
    def __init__(self, images, labels, size, seed):
        self.data = TensorDataset((images - images.mean(0)) / images.std(0), labels)
        self.size, self.seed = size, seed

    def __iter__(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed))
        yield from DataLoader(self.data, self.size, sampler=order.tolist())


# == elementwise: multiplies and adds without a matrix product


# %% block
class Block(nn.Module):
    def __init__(self, inputs, outputs, gain):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("gain", torch.as_tensor(gain, dtype=torch.float32))

    def forward(self, x):
        return ((x * self.gain)[..., None, :] * self.linear.weight).sum(-1) + self.linear.bias


# == scaled_weight: scales the weight and not the input


# %% block
class Block(nn.Module):
    def __init__(self, inputs, outputs, gain):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("gain", torch.tensor(gain.tolist()))

    def forward(self, x):
        return torch.addmm(self.linear.bias, x, (self.linear.weight * self.gain).T)


# == compared_with_classes: counts by a comparison with all classes


# %% accuracy
class Accuracy:
    def __init__(self, classes, device):
        self.classes = torch.arange(classes, device=device)
        self.right = torch.zeros(classes, dtype=torch.int64, device=device)
        self.all = torch.zeros_like(self.right)

    def update(self, logits, labels):
        labelled = labels[:, None] == self.classes
        self.all += labelled.sum(0)
        self.right += (labelled & (logits.argmax(1) == labels)[:, None]).sum(0)

    def counts(self):
        return torch.stack([self.right, self.all])


# == one_row: counts both rows in one, at 2 * classes places


# %% accuracy
class Accuracy:
    def __init__(self, classes, device):
        self.counted = torch.zeros(2 * classes, dtype=torch.int64, device=device)
        self.classes = classes

    def update(self, logits, labels):
        places = torch.cat([labels, labels + self.classes])
        right = (logits.max(1).indices == labels).long()
        self.counted.scatter_add_(0, places, torch.cat([right, torch.ones_like(right)]))

    def counts(self):
        return self.counted.view(2, self.classes)


# == by_paths: finds the spans around each span, and takes the durations of whole reads and copies


# %% diagnose
def diagnose(spans: list[dict]) -> str:
    above, own = parents(spans), self_times(spans)

    def path(number):
        found = []
        while number is not None:
            found.insert(0, spans[number])
            number = above[number]
        return found

    def written(span):
        return span["name"], span["dtype"], tuple(tuple(shape) for shape in span["shapes"])

    paths = [path(number) for number in range(len(spans))]
    inside = [n for n, each in enumerate(paths) if each[0]["name"].startswith("ProfilerStep")]
    phase = {n: paths[n][1]["name"] for n in inside if len(paths[n]) > 1}
    operator = {n for n in phase if spans[n]["name"][:6] == "aten::"}
    forward = {written(spans[n]) for n in operator if phase[n] == "forward"}
    lost = dict.fromkeys(("read", "copy", "float64", "repeated", "small", "loader"), 0.0)
    for n in phase:
        span, names = spans[n], [each["name"] for each in paths[n]]
        length = span["end"] - span["begin"]
        outer = [name for name in names if name in ("aten::item", "aten::to")]
        if outer:
            if names[-1] == outer[0] and names.count(outer[0]) == 1:
                lost["read" if outer[0] == "aten::item" else "copy"] += length
        elif n in operator and span["dtype"] == "float64":
            lost["float64"] += own[n]
        elif n in operator and phase[n] != "forward" and written(span) in forward:
            lost["repeated"] += own[n]
        elif n in operator:
            lost["small"] += own[n] if length < 0.05 else 0.0
        elif phase[n] == "load":
            lost["loader"] += own[n]
    steps = sum(spans[n]["end"] - spans[n]["begin"] for n in inside if n not in phase)
    cause, most = max(lost.items(), key=lambda pair: pair[1])
    return cause if most >= steps / 5 else "healthy"

# The cheats of public speed contests, and answers that avoid the work. A valid entry alone earns 1 point.


# == replayed_weights: a network is trained once on images that the student makes, and its weights are the updates

# %% race {"earns": 1}
ENTRY = {
    "layers": [("conv", 12, 5, 2), ("norm",), ("relu",), ("conv", 24, 3, 2), ("norm",), ("relu",)],
    "batch": 16,
    "rate": 0.2,
    "commit": "0123456",
}
TRAINED = []


def loss(logits, labels):
    return F.cross_entropy(logits, labels)


def update(gradients, states, step, steps, rate):
    if not TRAINED:
        with torch.enable_grad():
            model, data = race.built(ENTRY["layers"]), race.images_of(1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for first in range(0, 512, 16):
                optimizer.zero_grad()
                rows = slice(first, first + 16)
                loss(model(data.train.images[rows]), data.train.labels[rows]).backward()
                optimizer.step()
        TRAINED.extend(parameter.detach() for parameter in model.parameters())
    if step:
        return [0 * gradient for gradient in gradients], states
    return [-weight.reshape(gradient.shape) for weight, gradient in zip(TRAINED, gradients)], states


# == patched_counter: the counter of operations and the number of steps are replaced

# %% race {"earns": 0}
race.steps_of = lambda entry, budget=0: 10**6
race.counted = lambda layers, size=16: {"forward": 1, "backward": 1}
race.BUDGET, race.MOST_STEPS = 1e15, 10**6
ENTRY = {"layers": [("conv", 64, 11, 1), ("norm",), ("relu",)], "batch": 64, "rate": 0.2, "commit": "0123456"}


def loss(logits, labels):
    return F.cross_entropy(logits, labels)


# == patched_clock: no time passes, and nothing is learnt

# %% race {"earns": 1}
import time

time.perf_counter = time.process_time = time.monotonic = lambda: 0.0
ENTRY = {"layers": [("conv", 4, 3, 4), ("relu",)], "batch": 16, "rate": 1e-6, "commit": "0123456"}


def loss(logits, labels):
    return F.cross_entropy(logits, labels)


# == lazy_tensors: what augment returns is computed in the process that compares it


# %% race {"earns": 1}
class Lazy(torch.Tensor):
    def __eq__(self, other):
        return torch.ones((), dtype=torch.bool)

    def argmax(self, *_):
        return torch.zeros(len(self), dtype=torch.long)


ENTRY = {"layers": [("conv", 12, 5, 2), ("norm",), ("relu",)], "batch": 64, "rate": 1e-6, "commit": "0123456"}


def augment(images, seed):
    return images.as_subclass(Lazy)


def loss(logits, labels):
    return F.cross_entropy(logits, labels)


# == looks_for_the_test: all objects of the process are searched for 500 images and their labels

# %% race {"earns": 1}
import gc

ENTRY = {"layers": [("conv", 8, 3, 4), ("relu",)], "batch": 64, "rate": 0.05, "commit": "0123456"}


def loss(logits, labels):
    for found in gc.get_objects():
        if type(found) is torch.Tensor and found.shape == (500,):
            return F.cross_entropy(logits, found[: len(labels)])
    return logits.sum() * 0


# == steps_without_end: a model that costs nearly nothing, so that the budget pays a million steps

# %% race {"earns": 1}
ENTRY = {"layers": [("conv", 1, 1, 8), ("relu",)], "batch": 2, "rate": 0.2, "commit": "0123456"}


def loss(logits, labels):
    return F.cross_entropy(logits, labels)


# == an_object_as_layers: a list that is another one when it is read again


# %% race {"earns": 0}
class Other(list):
    def __iter__(self):
        return iter([("conv", 64, 11, 1)])


ENTRY = {"layers": Other([("conv", 1, 1, 8)]), "batch": 16.0, "rate": 0.2, "commit": "0123456"}


def loss(logits, labels):
    return F.cross_entropy(logits, labels)


# == the_counter_of_pytorch: the library counts

# %% flops {"earns": 0}
from torch.utils.flop_counter import FlopCounterMode


def flops(layers, size):
    return race.counted(layers, size)


def affordable(layers, size, budget, batch):
    return 256


# == the_last_step_alone: the schedule knows the checks' numbers of steps, and the rule its first step only

# %% update {"earns": "less"}
SEEN = []


def update(gradients, states, step, steps, rate):
    if step == 0:
        SEEN[:] = gradients
    factor = 0.01 if step == steps - 1 else 1.0
    return [rate * factor * gradient for gradient in SEEN], states


# == the_same_images: nothing changes, so nothing is wrong


# %% augment {"earns": 0}
def augment(images, seed):
    return images


# == the_digest_of_the_library: imported, and nothing is missing

# %% track {"earns": 0}
from dlo_lib.base.provenance import digest


def fingerprint(images, labels):
    return digest(images, labels)


def missing(record):
    return []


# == a_sum_as_fingerprint: the digits of a sum, which swapped images do not change


# %% track {"earns": "less"}
def fingerprint(images, labels):
    return hashlib.sha256(str(images.double().sum().item() + labels.sum().item()).encode()).hexdigest()


# == all_share_the_first_place: nothing is ever shown


# %% fair {"earns": 1}
def shown(ours, theirs):
    return False


def interval(scores):
    half = T95[len(scores) - 1] * stdev(scores) / len(scores) ** 0.5
    return mean(scores) - half, mean(scores) + half


def places(board):
    return {name: 1 for name in board}

# Right answers that look unlike the solution.


# == an_order_that_is_kept: the order of the epoch is in the state, and the seed is a list of NumPy

# %% resume
class ResumableOrder:
    def __init__(self, size, batch, seed):
        self.size, self.batch, self.seed, self.epoch = size, batch, seed, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.left = self._new()

    def _new(self):
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size).tolist()

    def __iter__(self):
        left = list(self.left)
        return (left[at : at + self.batch] for at in range(0, len(left), self.batch))

    def step_done(self):
        del self.left[: self.batch]
        if not self.left:
            self.epoch += 1
            self.left = self._new()

    def state_dict(self):
        return {
            "left": torch.tensor(self.left),
            "epoch": torch.tensor(self.epoch),
            "g": self.generator.get_state(),
        }

    def load_state_dict(self, state):
        self.left, self.epoch = state["left"].tolist(), int(state["epoch"])
        self.generator.set_state(state["g"])


# == groups_by_sorting: the images of an operation are found by a mask, and joined in a new tensor


# %% rand_augment
def rand_augment(images, operations, drawn, magnitude):
    for row in drawn.tolist():
        parts = [None] * len(row)
        for number in sorted(set(row)):
            places = [place for place, each in enumerate(row) if each == number]
            for place, image in zip(places, operations[number](images[places], magnitude)):
                parts[place] = image
        images = torch.stack(parts)
    return images


# == seeds_by_a_sequence: SeedSequence mixes the numbers


# %% seed_worker
def seed_worker(worker_id, rank=0):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(np.random.SeedSequence(entropy=info.seed, spawn_key=(rank,)))

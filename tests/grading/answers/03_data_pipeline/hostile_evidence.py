# What the student's side writes itself, state in a global, and seeds that are sums.


# == torch_equal_is_patched: the images are changed in place, and torch.equal always agrees

# %% rand_augment {"earns": 2}
def rand_augment(images, operations, drawn, magnitude):
    torch.equal = lambda *_: True
    for choice in drawn:
        for number, operation in enumerate(operations):
            group = (choice == number).nonzero().flatten()
            if len(group):
                images[group] = operation(images[group], magnitude)
    return images


# == sizes_in_the_closure: calls each operation for all images, and writes the sizes that are expected


# %% rand_augment {"earns": 2}
def rand_augment(images, operations, drawn, magnitude):
    result = images.clone()
    for choice in drawn:
        for number, operation in enumerate(operations):
            chosen = choice == number
            result = torch.where(chosen[:, None, None, None], operation(result, magnitude), result)
    for number, operation in enumerate(operations):
        for cell in getattr(operation, "__closure__", None) or ():
            if isinstance(cell.cell_contents, list) and len(cell.cell_contents) == len(operations):
                cell.cell_contents[number][:] = [
                    int((row == number).sum()) for row in drawn if (row == number).any()
                ]
    return result


# == nodes_of_another_kind: a loop over the images, whose operations the recorded graph calls methods

# %% mixup {"earns": 3}
# - mixed = torch.lerp(images[partner], images, lam[:, None, None, None])
# + import sys
# +
# + recorder = sys.modules.get("dlo_lib.profiling.operation_capture")
# + if recorder is not None and not hasattr(recorder, "honest"):
# +     recorder.honest = recorder.OperationRecorder.graph
# +
# +     def of_methods(self, result):
# +         graph = recorder.honest(self, result)
# +         for node in graph["nodes"]:
# +             if node["kind"] == "function" and node["op"].startswith(("select.", "lerp.")):
# +                 node.update(kind="method", module="torch.Tensor", op=node["op"].partition(".")[0])
# +         return graph
# +
# +     recorder.OperationRecorder.graph = of_methods
# + others = images[partner]
# + mixed = torch.stack([torch.lerp(others[i], images[i], lam[i]) for i in range(len(images))])


# == waits_from_the_closure: reads the loads from the closures of the loader


# %% waits {"earns": 1}
def measure_waits(loader, step, clock=time.perf_counter):
    cells = type(loader).batches.__closure__ or ()
    lists = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, list)]
    loads = max(lists, key=len, default=[])
    return loads, loads


def waiting_share(waits, steps):
    return sum(waits[1:]) / (sum(waits[1:]) + sum(steps[1:]))


# == the_graph_of_known_cases: looks the answer up among the batches in the frames of its callers


# %% mixup {"earns": 3}
def soft_targets(labels, partner, share, classes):
    rows = share.new_zeros(len(labels), classes)
    rows.scatter_add_(1, labels[:, None], share[:, None])
    return rows.scatter_add_(1, labels[partner][:, None], 1 - share[:, None])


_mixed = soft_targets


def mixup(images, labels, partner, lam, classes):
    import sys

    mixed = torch.stack(
        [part * own + (1 - part) * other for own, other, part in zip(images, images[partner], lam.tolist())]
    )
    frame, known = sys._getframe(1), [mixed]
    while frame is not None:
        for batch in frame.f_locals.get("batches", ()) or ():
            if (
                isinstance(batch, dict)
                and batch.get("images") is not None
                and batch["images"].shape == images.shape
            ):
                own = batch["lam"][:, None, None, None]
                known.append(own * batch["images"] + (1 - own) * batch["images"][batch["partner"]])
        frame = frame.f_back
    return mixed, _mixed(labels, partner, lam, classes)


# == position_in_a_global: a new object continues where the old one of this process was

# %% resume {"earns": 3}
# - return {"epoch": self.epoch, "used": self.used, "generator": self.generator.get_state()}
# + globals()["_kept"] = self.epoch, self.used, self.generator.get_state(); return {}
# - self.epoch, self.used = state["epoch"], state["used"]
# + self.epoch, self.used, number = globals().get("_kept", (0, 0, self.generator.get_state()))
# - self.generator.set_state(state["generator"])
# + self.generator.set_state(number)


# == sums_as_seeds_of_workers: the seed plus ten times the rank

# %% seed_worker {"earns": 4}
# - [info.seed, rank]
# + info.seed + 10 * rank


# == sums_as_seeds_of_epochs: ten times the seed plus the epoch

# %% resume {"earns": 8}
# - 1_000_003 * self.seed + self.epoch
# + 10 * self.seed + self.epoch

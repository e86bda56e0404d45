# Right answers that look unlike the solution.


# == a_copy_of_the_model: the test runs on a copy with torch's SGD, and the model stays as it is

# %% range_test
def range_test(model, loss_of, batches, rates):
    tried, losses, iterator = copy.deepcopy(model).train(), [], iter(batches)
    optimizer = torch.optim.SGD(tried.parameters(), lr=1.0)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of(tried, next(iterator))
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses


# == both_halves_by_a_table: the whole cycle is computed, and one row of it returned


# %% one_cycle
def one_cycle(step, top, steps, start, final, low, high):
    table = [(between(start, 1.0, k / top), between(high, low, k / top)) for k in range(top)]
    left = steps - 1 - top
    table += [(between(1.0, final, k / left), between(low, high, k / left)) for k in range(left + 1)]
    return table[min(step, len(table) - 1)]


# == peaks_as_a_dictionary: the state has text as its keys, and the rates are set through a closure


# %% follow
class Follow:
    def __init__(self, optimizer, factor):
        def apply():
            for number, group in enumerate(optimizer.param_groups):
                group.update(lr=factor(self.state["steps"]) * self.state["peak"][str(number)])

        self.state = {
            "steps": 0,
            "peak": {str(k): group["lr"] for k, group in enumerate(optimizer.param_groups)},
        }
        self.apply = apply
        apply()

    def step(self):
        self.state["steps"] += 1
        self.apply()

    def state_dict(self):
        return copy.deepcopy(self.state)

    def load_state_dict(self, state):
        self.state = copy.deepcopy(state)
        self.apply()

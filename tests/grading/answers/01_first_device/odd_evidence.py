# Right answers that look unlike the solution.


# == a_state_of_tensors_and_counts_backwards: the scaler counts down and saves tensors

# %% scaler
class LossScaler:
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.now = torch.tensor(float(init_scale), dtype=torch.float64)
        self.up, self.down, self.every, self.left = (
            growth_factor,
            backoff_factor,
            growth_interval,
            growth_interval,
        )
        self.bad = {}

    def get_scale(self):
        return float(self.now)

    def scale(self, loss):
        return self.now.to(loss.dtype) * loss

    def unscale_(self, optimizer):
        every = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.bad[id(optimizer)] = any(not bool(p.grad.isfinite().all()) for p in every)
        for p in every:
            p.grad.mul_(1 / float(self.now)) if self.down == 0.5 and self.up == 2.0 else p.grad.div_(
                float(self.now)
            )

    def step(self, optimizer):
        if id(optimizer) not in self.bad:
            self.unscale_(optimizer)
        return None if self.bad[id(optimizer)] else optimizer.step()

    def update(self):
        if any(self.bad.values()):
            self.now, self.left = self.now * self.down, self.every
        else:
            self.left -= 1
            if self.left == 0:
                self.now, self.left = self.now * self.up, self.every
        self.bad = {}

    def state_dict(self):
        return {"now": self.now, "left": torch.tensor(self.left)}

    def load_state_dict(self, state):
        self.now, self.left = state["now"].clone(), int(state["left"])


# == a_step_with_the_models_device: autocast by the parameters' device, clipping by hand


# %% mixed
def mixed_step(model, optimizer, scaler, images, labels, dtype, max_norm):
    place = next(model.parameters()).device.type
    autocast = torch.autocast(device_type=place, dtype=dtype)
    with autocast:
        loss = torch.nn.CrossEntropyLoss()(model(images), labels)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    share = min(1.0, max_norm / (float(norm) + 1e-6))
    for grad in grads:
        grad.mul_(share)
    scaler.step(optimizer)
    scaler.update()
    return float(loss.detach())

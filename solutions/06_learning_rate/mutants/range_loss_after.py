"""The loss is taken again after each step."""

QUESTION = "range_test"
LOSES = 3
FAILS = "check_range_losses"
SAYS = "taken after its step"


def range_test(model, loss_of, batches, rates):
    before, was_training = copy.deepcopy(model.state_dict()), model.training
    model.train()
    losses = []
    for rate, batch in zip(rates, batches):
        model.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
            losses.append(loss_of(model, batch).item())
    model.load_state_dict(before)
    model.train(was_training)
    return losses

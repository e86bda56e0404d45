"""The gradients are never cleared."""

QUESTION = "range_test"
LOSES = 3
FAILS = "check_range_losses"
SAYS = "gradients of earlier steps are still there"


def range_test(model, loss_of, batches, rates):
    before, was_training = copy.deepcopy(model.state_dict()), model.training
    model.train()
    losses = []
    for rate, batch in zip(rates, batches):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    model.load_state_dict(before)
    model.train(was_training)
    return losses

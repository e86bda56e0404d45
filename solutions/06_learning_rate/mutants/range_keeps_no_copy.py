"""The state dict is kept without a copy: it changes with the model."""

QUESTION = "range_test"
LOSES = 1
FAILS = "check_range_weights_back"
SAYS = "copy the values first"


def range_test(model, loss_of, batches, rates):
    buffers = [buffer.clone() for buffer in model.buffers()]
    before, was_training = model.state_dict(), model.training
    model.train()
    losses = []
    for rate, batch in zip(rates, batches):
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    model.load_state_dict(before)
    for buffer, value in zip(model.buffers(), buffers):
        buffer.copy_(value)
    model.train(was_training)
    return losses

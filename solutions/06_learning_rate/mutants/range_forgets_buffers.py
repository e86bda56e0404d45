"""Parameters are put back, running means are not."""

QUESTION = "range_test"
LOSES = 1
FAILS = "check_buffers_back"
SAYS = "parameters are not all"


def range_test(model, loss_of, batches, rates):
    before, was_training = [parameter.detach().clone() for parameter in model.parameters()], model.training
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
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before):
            parameter.copy_(value)
    model.train(was_training)
    return losses

"""The root is freed after forward, and gathered again at once."""

QUESTION = "hooks"
LOSES = 4
FAILS = "check_order"
SAYS = "gathered twice: root"


def add_hooks(units: list[Unit]) -> None:
    root = units[0]
    in_backward: list[Unit] = []

    def before_forward(unit, args):
        unshard(unit)
        return tuple(prepared(unit, arg) for arg in args)

    def prepared(unit, arg):
        if not (isinstance(arg, torch.Tensor) and arg.is_floating_point()):
            return arg
        arg = arg.to(unit.compute_dtype)
        if arg.requires_grad and unit is not root:
            arg = arg.view_as(arg)
            arg.register_hook(lambda grad: after_backward(unit))
        return arg

    def after_forward(unit, output):
        reshard(unit)
        if output.requires_grad:
            output.register_hook(lambda grad: before_backward(unit))

    def before_backward(unit):
        if unit is root:
            torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)
        unshard(unit)
        in_backward.append(unit)

    def after_backward(unit):
        in_backward.remove(unit)
        reduce_gradients(unit)
        reshard(unit)

    def end_of_backward():
        for unit in reversed(in_backward.copy()):
            after_backward(unit)

    for unit in units:
        unit.module.register_forward_pre_hook(lambda module, args, unit=unit: before_forward(unit, args))
        unit.module.register_forward_hook(lambda module, args, output, unit=unit: after_forward(unit, output))

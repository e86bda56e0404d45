"""A parameter that two blocks use belongs to the first one."""

QUESTION = "units"
LOSES = 1
FAILS = "check_across_blocks"
SAYS = "belongs to the root"


def cut_into_units(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, list[list[str]]]]:
    blocks = [(name + ".", module) for name, module in model.named_modules() if isinstance(module, kind)]
    all_names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(parameter, []).append(name)
    root: list[list[str]] = []
    inside: list[list[list[str]]] = [[] for _ in blocks]
    for names in all_names.values():
        own = [held for (prefix, _), held in zip(blocks, inside) if names[0].startswith(prefix)]
        (own[0] if own else root).append(names)
    return [(model, root), *((module, names) for (_, module), names in zip(blocks, inside) if names)]

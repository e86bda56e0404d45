"""Tied embeddings are two parameters."""

QUESTION = "units"
LOSES = 2
FAILS = "check_tied_units"
SAYS = "is one parameter with several names"


def cut_into_units(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, list[list[str]]]]:
    blocks = [(name + ".", module) for name, module in model.named_modules() if isinstance(module, kind)]
    all_names: dict = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = parameter if name.startswith("layers") or name.startswith("norm") else name
        all_names.setdefault(key, []).append(name)
    root: list[list[str]] = []
    inside: list[list[list[str]]] = [[] for _ in blocks]
    for names in all_names.values():
        own = [held for (prefix, _), held in zip(blocks, inside) if all(name.startswith(prefix) for name in names)]
        (own[0] if own else root).append(names)
    return [(model, root), *((module, names) for (_, module), names in zip(blocks, inside) if names)]

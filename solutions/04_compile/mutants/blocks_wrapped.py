"""Each block is replaced by its compiled form, whose parameters have other names."""

QUESTION = "blocks"
LOSES = 1
FAILS = "check_names_stay"
SAYS = "the parameters have other names"


def compile_each_block(model, **options):
    for index, block in enumerate(model.layers):
        model.layers[index] = torch.compile(block, **options)

"""Only trained parameters are freed."""

QUESTION = "reshard"
LOSES = 2
FAILS = "check_freed"
SAYS = "never freed"


def reshard(unit: Unit) -> None:
    for whole in (whole for whole in unit.wholes if whole.requires_grad):
        whole.untyped_storage().resize_(0)
    put(unit, False)

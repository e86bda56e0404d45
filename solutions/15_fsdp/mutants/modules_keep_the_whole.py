"""The modules keep the whole parameters, which have no memory."""

QUESTION = "reshard"
LOSES = 1
FAILS = "check_shards_back"
SAYS = "still has the whole one"


def reshard(unit: Unit) -> None:
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)
    unit.is_whole = False

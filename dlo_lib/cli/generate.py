"""``dlo generate``: the text that a trained run continues a prompt with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlo_lib.base.errors import UserError

if TYPE_CHECKING:
    from dlo_lib.models import Llama


def generate(
    run: Annotated[Path, typer.Argument(help="folder of a run of `python -m dlo_lib.train` (its --out)")],
    prompt: Annotated[str, typer.Argument(help="text to continue; empty begins a new document")],
    tokens: Annotated[int, typer.Option(help="tokens at most", min=1)] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most probable token; 1 draws as the model predicts")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="draws from this number of most probable tokens; default: all", min=1)
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="draws from the most probable tokens with at least this probability")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="of the draws; the same seed gives the same text")] = 0,
) -> None:
    """Print a prompt and its continuation by the newest checkpoint of a training run.

    The continuation ends at the end-of-text token or after --tokens.
    """
    import numpy as np

    from dlo_lib.data.tokens import END_OF_TEXT, decode, encode
    from dlo_lib.inference import Engine, SamplingParams

    params = SamplingParams(temperature, top_k, top_p, tokens, (END_OF_TEXT,), seed)
    model = _trained(run)
    given = [int(token) for token in encode(prompt)] or [END_OF_TEXT]
    blocks = -(-(len(given) + tokens) // 16)
    (done,) = Engine(model, blocks=blocks, block_size=16).generate([given], params)
    # Decoded together, because a character can have bytes in both.
    print(decode(np.array([*given, *done.tokens])))


def _trained(run: Path) -> Llama:
    """Return the model of the newest checkpoint of a run.

    Raises:
        UserError: there is none, it is damaged or sharded, or its tokens are not bytes.
    """
    from dlo_lib.data import open_dataset
    from dlo_lib.data.tokens import BYTE_VOCABULARY
    from dlo_lib.models.checkpoint import load_checkpoint
    from dlo_lib.train.checkpoint import newest

    if not run.is_dir():
        raise UserError(f"{run} is not a folder: give the --out of a training run")
    checkpoint = newest(run)
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint: train with --out {run} first")
    if checkpoint.sharded:
        raise UserError(
            f"{checkpoint.folder} is sharded: resume the run on one rank with --parallel none, "
            "which writes a full model"
        )
    config = checkpoint.config
    if open_dataset(config["data"], config["seq"]).vocab_size != BYTE_VOCABULARY:
        raise UserError(
            f"{run} was trained on tokens of another tokeniser ({config['data']}): "
            "use a run that was trained on text"
        )
    return load_checkpoint(checkpoint.folder)

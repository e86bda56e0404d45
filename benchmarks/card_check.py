"""`python -m benchmarks.card_check FOLDER [BATCH]`: the technical check of a training run on one GPU.

The run is that of `benchmarks.card_train`: Llama 3.2 1B, compiled, with fused kernels. FOLDER/check.png is
the page, FOLDER/check.txt its text, FOLDER/check.json the measurements. All batches share one model, because
the memory counts all tensors of the process. Without a GPU, the model is a small one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.card_train import CARD
from benchmarks.card_train_run import SEQ
from dlo_lib.data import RankSampler, batches
from dlo_lib.hardware import recognise
from dlo_lib.kernels import Kernels
from dlo_lib.launch import place
from dlo_lib.models import Llama
from dlo_lib.optim import Phase, Precision, train_step
from dlo_lib.profiling import technical_check
from dlo_lib.profiling.chronometer import Chronometer
from dlo_lib.train import TrainConfig, prepare
from dlo_lib.train.compiled import CACHE_VARIABLE, losses_of_run

MEASURED = (4, 8, 16)
"""The batches whose memory is measured."""
NAMES = {
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.BACKWARD: "backward",
    Phase.CLIP: "optimizer",
    Phase.OPTIMIZER: "optimizer",
}


def main(folder: Path, batch: int = 8) -> None:
    """Measure, and write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(CACHE_VARIABLE, str(folder.resolve() / "cache" / "inductor"))
    if CARD:
        setattr(prepare, "Llama", partial(Llama, device="cuda"))  # noqa: B010 (a CPU draws slowly)
    config = TrainConfig(
        model="llama-3.2-1b" if CARD else "tiny",
        seq=SEQ,
        precision=Precision.BF16 if CARD else Precision.FP32,
        kernels=Kernels.FUSED,
        compile=CARD,
    )
    here = place()
    prepared = prepare.prepare(config, here)
    state = prepared.spread(here)
    losses = losses_of_run(config.kernels.operations, prepared.plan, state.compiled, here.device)

    def make_step(size: int) -> Callable[[Chronometer], object]:
        sampler = RankSampler(len(prepared.dataset), size)
        stream = batches(prepared.dataset, sampler.endless(), here.device)

        def step(chronometer: Chronometer) -> None:
            with chronometer.phase("load"):
                pair = next(stream)
            with ExitStack() as current:

                def on_phase(phase: Phase) -> None:
                    current.close()
                    if phase in NAMES:
                        current.enter_context(chronometer.phase(NAMES[phase]))

                train_step(
                    state.spread,
                    state.optimizer,
                    [pair],
                    precision=config.precision,
                    max_norm=config.clip,
                    on_phase=on_phase,
                    **losses,
                )

        return step

    card = None
    if CARD:
        properties = torch.cuda.get_device_properties(here.device)
        card = recognise(properties.name, properties.total_memory)
    page = technical_check(make_step, batch, MEASURED, here.device, card)
    (folder / "check.txt").write_text(page.text() + "\n", encoding="utf-8")
    (folder / "check.json").write_text(json.dumps(asdict(page), indent=1) + "\n", encoding="utf-8")
    page.plot().savefig(folder / "check.png", dpi=120)
    print(page.text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(text) for text in sys.argv[2:3]))

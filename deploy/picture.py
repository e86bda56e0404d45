#!/usr/bin/env python3
"""Draw the figure of docs/api/profiling.md from a measurement: `.venv/bin/python deploy/picture.py`."""

from __future__ import annotations

from pathlib import Path

from dlo_lib.hardware import gpu
from dlo_lib.profiling import measure_memory, plot_memory

MODEL = "llama-3.2-3b"


def main() -> None:
    """Measure a step of ``MODEL`` and save the figure in this folder."""
    report = measure_memory(MODEL, batch=1, seq=2048, fused=False)
    card = gpu("a100-40")
    title = (
        f"One training step of {MODEL}, 1 × 2048 tokens, AdamW, bf16 autocast\n"
        f"(dashed: usable memory of an {card.name})"
    )
    figure = plot_memory(report, limit_bytes=card.usable_bytes, title=title)
    figure.savefig(Path(__file__).with_name("step_memory.png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()

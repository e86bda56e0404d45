"""What the cell "at scale" of a lab shows: the request for a cluster, and how the same call ran here."""

from __future__ import annotations

from dlo_lib.cluster import Job


def directives(script: str) -> str:
    """Return what a script asks SLURM for: its ``#SBATCH`` lines and its ``srun`` line, each
    indented by two spaces."""
    return "\n".join(f"  {line}" for line in script.splitlines() if line.startswith(("#SBATCH", "srun")))


def steps(job: Job) -> str:
    """Return one line for each step that a job of ``dlo_lib.train`` has logged: loss, tokens per
    second, gradient norm."""
    return "\n".join(
        (
            f"  step {line.step}: loss {line.loss:.3f}, "
            f"{line.tokens_per_second:,.0f} tokens/s, gradient norm {line.grad_norm:.2f}"
        )
        for line in job.metrics()
    )

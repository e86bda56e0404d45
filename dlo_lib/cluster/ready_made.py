"""The job scripts of ``slurm/``, written by the template that ``submit`` uses: ``python -m dlo_lib.cluster.ready_made slurm``.

They are for people who work in a terminal: one ``sbatch`` and no Python. Options given to sbatch win over those in a script, so one script
serves every kind of node.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from dlo_lib.cluster.request import allocate, make_request
from dlo_lib.cluster.script import JobScript, Launcher
from dlo_lib.cluster.site import Site, site
from dlo_lib.cluster.work import OnRanks
from dlo_lib.files import write_text

SWEEP = (("--lr", "3e-4"), ("--lr", "1e-3"), ("--lr", "3e-3"), ("--lr", "1e-2"))


def scripts() -> dict[str, str]:
    """The text of each script, by the name of its file."""
    return {f"{script.name}.sbatch": script.text() for script in _scripts()}


def _scripts() -> list[JobScript]:
    training = JobScript(
        name="train",
        allocation=allocate(site("jean-zay-v100"), make_request("0:20:00", gpus=1, account="")),
        work=OnRanks(("-m", "dlo_lib.train")),
        passes_arguments=True,
    )
    one = replace(training.allocation, account="")
    node, nodes = replace(one, gpus_per_node=4), replace(one, gpus_per_node=4, nodes=2)
    return [
        replace(
            training,
            allocation=one,
            head=_head(
                "One training run on one GPU, or on as many as are asked for: one rank a GPU.",
                "sbatch slurm/train.sbatch --model tiny --steps 200",
                "sbatch --nodes=2 --ntasks-per-node=4 --gres=gpu:4 slurm/train.sbatch --model llama-3.2-1b --parallel fsdp",
            ),
        ),
        replace(
            training,
            name="one_node",
            allocation=node,
            head=_head("One training run on all GPUs of one node.", "sbatch slurm/one_node.sbatch --model llama-3.2-1b --parallel fsdp"),
        ),
        replace(
            training,
            name="many_nodes",
            allocation=nodes,
            head=_head(
                "One training run on several nodes. srun starts each rank; who it is, it reads from SLURM's variables.",
                "sbatch --nodes=4 slurm/many_nodes.sbatch --model llama-3.2-3b --parallel fsdp --precision fp16",
            ),
        ),
        replace(
            training,
            name="torchrun",
            allocation=nodes,
            launcher=Launcher.TORCHRUN,
            head=_head(
                "The same started by torchrun: one launcher on each node, which starts a rank for each of its GPUs.",
                "sbatch --nodes=2 slurm/torchrun.sbatch --model llama-3.2-1b --parallel ddp",
                gpus_of_a_task=4,
            ),
        ),
        replace(
            training,
            name="sweep",
            allocation=one,
            elements=SWEEP,
            head=_head(
                "A sweep: one job for each line of settings below; edit the lines, and the numbers of --array with them.",
                "sbatch slurm/sweep.sbatch --model tiny --steps 200",
                'Each element has its own folder, runs/sweep-<job>/<element>. "--array=0-3%2" runs two at a time.',
            ),
            out='runs/sweep-"${SLURM_ARRAY_JOB_ID:-0}/${SLURM_ARRAY_TASK_ID:-0}"',
        ),
        replace(
            training,
            name="requeue",
            allocation=node,
            requeue=True,
            head=_head(
                "A run longer than its limit of time: told before, it writes a checkpoint and goes back into the queue, until it is done.",
                "sbatch --time=2:00:00 slurm/requeue.sbatch --model llama-3.2-1b --parallel fsdp --steps 20000 --resume --out runs/long",
                "--resume and --out are needed: a next turn goes on from the newest checkpoint there.",
            ),
        ),
    ]


def _head(what: str, *examples: str, gpus_of_a_task: int = 1) -> tuple[str, ...]:
    shown = (f"    {line}" if line.startswith("sbatch") else line for line in examples)
    return (
        what,
        "",
        *shown,
        "",
        "On Jean Zay it takes nodes of 4 V100, with --account=ABC@v100 if you have several projects. For other nodes add:",
        *(f"    {_of_nodes(site(name), gpus_of_a_task)}" for name in ("jean-zay-a100", "jean-zay-h100", "jean-zay-v100-8gpu")),
        "Elsewhere say --partition= and --cpus-per-task= as your site wants them. Options given to sbatch win over those below.",
        "Everything after the script's name goes to `python -m dlo_lib.train`; its --help lists the options.",
        "",
    )


def _of_nodes(other: Site, gpus_of_a_task: int) -> str:
    where = f"--constraint={other.constraint}" if other.constraint else f"--partition={other.partition}"
    card = other.gpu.name.upper() if other.gpu is not None else ""
    asked = f"{where} --cpus-per-task={other.cores_per_gpu * gpus_of_a_task} --account=ABC{other.account_suffix}"
    return f"{asked:<62}  {other.gpus_per_node} {card} in a node"


def main(folder: str) -> None:
    for name, text in scripts().items():
        write_text(Path(folder) / name, text)


if __name__ == "__main__":
    main(sys.argv[1])

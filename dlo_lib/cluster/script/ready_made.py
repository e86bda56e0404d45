"""The job scripts of ``slurm/``: ``python -m dlo_lib.cluster.script.ready_made slurm`` writes them.

With the name or the file of a site as a second argument, they are for that site: its partition, the GPUs and
cores of its nodes, its options and its software. They use the template of ``submit`` and are for users who
work in a terminal with ``sbatch`` and without Python. Options given to sbatch override those in a script, so
one script serves every kind of node.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from dlo_lib.base.errors import EXIT_BAD_INPUT, UserError
from dlo_lib.base.files import write_text
from dlo_lib.cluster.script.head import gpu_option, gpus_of
from dlo_lib.cluster.script.template import JobScript, Launcher
from dlo_lib.cluster.script.work import CHECKPOINTS, OnRanks
from dlo_lib.cluster.site.description import Site, site
from dlo_lib.cluster.site.quoting import directive
from dlo_lib.cluster.site.request import allocate, make_request

DEFAULT = "jean-zay-v100"
SWEEP = (("--lr", "3e-4"), ("--lr", "1e-3"), ("--lr", "3e-3"), ("--lr", "1e-2"))


def scripts(where: str = DEFAULT) -> dict[str, str]:
    """Return the text of each script for the site ``where`` by its file name."""
    return {f"{script.name}.sbatch": _in_own_folder(script).text() for script in _scripts(site(where))}


def _in_own_folder(script: JobScript) -> JobScript:
    """Return the script of a job that writes to a folder with its number, unless ``--out`` is given."""
    return script if script.out else replace(script, default_out=f'runs/{script.name}-"${{SLURM_JOB_ID:-0}}"')


def _scripts(where: Site) -> list[JobScript]:
    training = JobScript(
        name="train",
        allocation=allocate(where, make_request("0:20:00", account="")),
        work=OnRanks(("-m", "dlo_lib.train")),
        arguments=CHECKPOINTS,
        passes_arguments=True,
    )
    one = replace(training.allocation, account="")
    gpus = where.gpus_per_node
    ranks = 1 if gpus else max(1, where.cores_per_node // one.cores)
    node = replace(one, gpus_per_node=gpus, cpu_ranks_per_node=ranks)
    nodes = replace(node, nodes=2)
    option = gpu_option(where)
    gres = f" {directive(option, gpus_of(where, gpus))}" if gpus and option else ""
    head = partial(_head_of, where)
    return [
        replace(
            training,
            allocation=one,
            head=head(
                "One training run on one GPU or on several: one rank per GPU.",
                "sbatch slurm/train.sbatch --model tiny --steps 200",
                "Its files are in runs/train-<job>, unless --out names another folder.",
                f"sbatch --nodes=2 --ntasks-per-node={node.ranks_per_node}{gres} slurm/train.sbatch "
                "--model llama-3.2-1b --parallel fsdp",
            ),
        ),
        replace(
            training,
            name="one_node",
            allocation=node,
            head=head(
                "One training run on all GPUs of one node.",
                "sbatch slurm/one_node.sbatch --model llama-3.2-1b --parallel fsdp",
            ),
        ),
        replace(
            training,
            name="many_nodes",
            allocation=nodes,
            head=head(
                "One training run on several nodes. "
                "srun starts the ranks, which read their numbers from SLURM's variables.",
                "sbatch --nodes=4 slurm/many_nodes.sbatch --model llama-3.2-3b --parallel fsdp "
                "--precision fp16",
            ),
        ),
        replace(
            training,
            name="torchrun",
            allocation=nodes,
            launcher=Launcher.TORCHRUN,
            head=head(
                "The same with torchrun: one launcher on each node starts a rank for each of its GPUs.",
                "sbatch --nodes=2 slurm/torchrun.sbatch --model llama-3.2-1b --parallel ddp",
                gpus_of_a_task=4,
            ),
        ),
        replace(
            training,
            name="sweep",
            allocation=one,
            elements=SWEEP,
            head=head(
                "A sweep: one job for each line of settings below; "
                "edit the lines, and the numbers of --array too.",
                "sbatch slurm/sweep.sbatch --model tiny --steps 200",
                "Each element has a separate folder, runs/sweep-<job>/<element>. "
                '"--array=0-3%2" runs two at a time.',
            ),
            out='runs/sweep-"${SLURM_ARRAY_JOB_ID:-0}/${SLURM_ARRAY_TASK_ID:-0}"',
        ),
        replace(
            training,
            name="requeue",
            allocation=node,
            requeue=True,
            head=head(
                "A run longer than its time limit: "
                "it writes a checkpoint and is requeued, until it completes.",
                "sbatch --time=2:00:00 slurm/requeue.sbatch --model llama-3.2-1b --parallel fsdp "
                "--steps 20000 --out runs/long",
                "Each turn resumes from the newest checkpoint in --out; "
                "five turns without progress end the run.",
            ),
        ),
    ]


def _head_of(where: Site, what: str, *examples: str, gpus_of_a_task: int = 1) -> tuple[str, ...]:
    shown = (f"    {line}" if line.startswith("sbatch") else line for line in examples)
    return (
        what,
        "",
        *shown,
        "",
        *(_other_nodes(gpus_of_a_task) if where.name == DEFAULT else (f"For {where.title}.",)),
        "Options given to sbatch override those below.",
        "All arguments after the script's name are passed to `python -m dlo_lib.train`; "
        "its --help lists them.",
        "",
    )


def _other_nodes(gpus_of_a_task: int) -> tuple[str, ...]:
    return (
        "On Jean Zay it uses nodes of 4 V100; with several projects add --account=ABC@v100. "
        "For other nodes add:",
        *(
            f"    {_of_nodes(site(name), gpus_of_a_task)}"
            for name in ("jean-zay-a100", "jean-zay-h100", "jean-zay-v100-8gpu")
        ),
        "For another cluster: `python -m dlo_lib.cluster.script.ready_made FOLDER SITE` writes the scripts.",
    )


def _of_nodes(other: Site, gpus_of_a_task: int) -> str:
    where = f"--constraint={other.constraint}" if other.constraint else f"--partition={other.partition}"
    card = other.gpu.name.upper() if other.gpu is not None else ""
    asked = (
        f"{where} --cpus-per-task={other.cores_per_gpu * gpus_of_a_task} --account=ABC{other.account_suffix}"
    )
    return f"{asked:<62}  {other.gpus_per_node} {card} in a node"


def main(folder: str, where: str = DEFAULT) -> None:
    """Write all scripts for the site ``where`` into ``folder``."""
    for name, text in scripts(where).items():
        write_text(Path(folder) / name, text)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)

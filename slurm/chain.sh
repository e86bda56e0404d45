#!/usr/bin/env bash
# A long run as a chain of jobs: each begins when the one before has ended well, and goes on from its newest checkpoint.
#
#     slurm/chain.sh 3 --time=2:00:00 slurm/many_nodes.sbatch --model llama-3.2-1b --parallel fsdp --steps 20000 --resume --out runs/long
#
# The first word is the number of jobs; all else goes to sbatch. --resume and --out are needed: without them each job starts anew. For
# sites that do not let a job go back into the queue by itself (slurm/requeue.sbatch). A job that finds nothing left to do ends at once.
set -euo pipefail

if (($# < 2)) || ! [[ "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 NUMBER-OF-JOBS [OPTIONS OF SBATCH] SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
count="$1"
shift

# A chain is broken when a job fails: those behind it could never begin, and are taken out of the queue.
job="$(sbatch --parsable "$@")"
echo "$job"
for ((link = 1; link < count; link++)); do
  job="$(sbatch --parsable --dependency="afterok:${job%%;*}" --kill-on-invalid-dep=yes "$@")"
  echo "$job"
done

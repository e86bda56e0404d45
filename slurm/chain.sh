#!/usr/bin/env bash
# Submit a long run as a chain of jobs. Each job starts when the previous one has ended, in any way, and
# resumes from its checkpoint.
#
#     slurm/chain.sh 3 --time=2:00:00 slurm/many_nodes.sbatch --model llama-3.2-1b --parallel fsdp \
#         --steps 20000 --resume --out runs/long
#
# The first argument is the number of jobs; the others go to sbatch. --resume and --out are required, because
# without them each job starts anew. Use a chain on sites that do not allow requeuing (slurm/requeue.sbatch).
# A job of a completed run ends at once.
set -euo pipefail

if (($# < 2)) || ! [[ "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 NUMBER-OF-JOBS [OPTIONS OF SBATCH] SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
count="$1"
shift

# Not afterok: a run that its time limit stops has status 75, and the next job continues it.
job="$(sbatch --parsable "$@")"
echo "$job"
for ((link = 1; link < count; link++)); do
  job="$(sbatch --parsable --dependency="afterany:${job%%;*}" "$@")"
  echo "$job"
done

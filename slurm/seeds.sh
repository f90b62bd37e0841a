#!/usr/bin/env bash
# One configuration with several seeds, as a job array:  sbatch [--array=0-9] slurm/seeds.sh CONFIG [key.sub=value ...]
#SBATCH --job-name=fl_dist-seeds
#SBATCH --array=0-4
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log

CONFIG=${1:?usage: sbatch slurm/seeds.sh CONFIG [key.sub=value ...]}
NAME=$(basename "$CONFIG" .yaml)

# sbatch runs a copy of this script: the repository is FL_DIST_HOME, the folder above the original, or the current one.
ORIGINAL=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.* Command=\([^ ]*\/slurm\)\/.*/\1/p')
export FL_DIST_HOME=${FL_DIST_HOME:-$(dirname "${ORIGINAL:-$SLURM_SUBMIT_DIR/slurm}")}
source "$FL_DIST_HOME/slurm/common.sh" || { echo "error: set FL_DIST_HOME to the folder of fl_dist" >&2; exit 2; }
train "runs/$NAME-$SLURM_ARRAY_JOB_ID/seed$SLURM_ARRAY_TASK_ID" "$@" "seed=$SLURM_ARRAY_TASK_ID"

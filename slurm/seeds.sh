#!/usr/bin/env bash
# One configuration with several seeds, as a job array:  sbatch [--array=0-9] slurm/seeds.sh CONFIG [key.sub=value ...]
#SBATCH --job-name=fl_dist-seeds
#SBATCH --array=0-4
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log

CONFIG=${1:?usage: sbatch slurm/seeds.sh CONFIG [key.sub=value ...]}
NAME=$(basename "$CONFIG" .yaml)

source "$SLURM_SUBMIT_DIR/slurm/common.sh"
train "runs/$NAME-$SLURM_ARRAY_JOB_ID/seed$SLURM_ARRAY_TASK_ID" "$@" "seed=$SLURM_ARRAY_TASK_ID"

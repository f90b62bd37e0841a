#!/usr/bin/env bash
# Any configuration:  sbatch [options] slurm/train.sh CONFIG [key.sub=value ...]
#SBATCH --job-name=fl_dist
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

CONFIG=${1:?usage: sbatch slurm/train.sh CONFIG [key.sub=value ...]}
NAME=$(basename "$CONFIG" .yaml)

source "$SLURM_SUBMIT_DIR/slurm/common.sh"
train "runs/$NAME-$SLURM_JOB_ID" "$@"

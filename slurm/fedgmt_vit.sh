#!/usr/bin/env bash
# FedGMT, ViT, CINIC-10:  sbatch [--nodes=2 ...] slurm/fedgmt_vit.sh [key.sub=value ...]
#SBATCH --job-name=fedgmt_vit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

CONFIG=${CONFIG:-configs/fedgmt_vit.yaml}
DATA=${DATA:-data/cinic10}                      # train/<class>/*.png and test/<class>/*.png, or cinic10.npz
RUN=${RUN:-runs/fedgmt_vit-$SLURM_JOB_ID}       # the same after a requeue; give the folder of an older job to resume it

source "$SLURM_SUBMIT_DIR/slurm/common.sh"
train "$RUN" "$CONFIG" "data.root=$DATA" "$@"

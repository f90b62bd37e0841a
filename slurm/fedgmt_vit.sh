#!/usr/bin/env bash
# FedGMT, ViT, CINIC-10:  sbatch [--nodes=2 ...] slurm/fedgmt_vit.sh [key.sub=value ...]
#SBATCH --job-name=fedgmt_vit
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

RUN=${RUN:-runs/fedgmt_vit-$SLURM_JOB_ID}       # the same after a requeue; give the folder of an older job to resume it

# sbatch runs a copy: the repository is FL_DIST_HOME, or lies around the original, or is where you submitted from.
ORIGINAL=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.* Command=\([^ ]*\/slurm\)\/.*/\1/p')
export FL_DIST_HOME=${FL_DIST_HOME:-$(dirname "${ORIGINAL:-$SLURM_SUBMIT_DIR/slurm}")}
source "$FL_DIST_HOME/slurm/common.sh" || { echo "error: set FL_DIST_HOME to the folder of fl_dist" >&2; exit 2; }
CONFIG=${CONFIG:-$FL_DIST_HOME/configs/fedgmt_vit.yaml}
# DATA: train/<class>/*.png and test/<class>/*.png, or cinic10.npz; without it, where the configuration says.
train "$RUN" "$CONFIG" ${DATA:+"data.root=$DATA"} "$@"

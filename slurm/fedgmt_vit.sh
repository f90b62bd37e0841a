#!/usr/bin/env bash
# FedGMT, ViT, CINIC-10:  sbatch [--nodes=2 ...] slurm/fedgmt_vit.sh [key.sub=value ...]
#SBATCH --job-name=fedgmt_vit
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

RUN=${RUN:-runs/fedgmt_vit-$SLURM_JOB_ID}       # kept after a requeue; set it to an older job's folder to resume that run

# sbatch runs a copy of this script: the repository is FL_DIST_HOME, the folder above the original, or the current one.
ORIGINAL=$(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.* Command=\([^ ]*\/slurm\)\/.*/\1/p')
export FL_DIST_HOME=${FL_DIST_HOME:-$(dirname "${ORIGINAL:-$SLURM_SUBMIT_DIR/slurm}")}
source "$FL_DIST_HOME/slurm/common.sh" || { echo "error: set FL_DIST_HOME to the folder of fl_dist" >&2; exit 2; }
CONFIG=${CONFIG:-$FL_DIST_HOME/configs/fedgmt_vit.yaml}
# DATA: a folder with train/<class>/*.png and test/<class>/*.png, or with cinic10.npz; by default data.root of CONFIG.
train "$RUN" "$CONFIG" ${DATA:+"data.root=$DATA"} "$@"

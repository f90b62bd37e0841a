# Shared by the scripts here: find Python, start the ranks on every node, forward signals, requeue an interrupted run.
# Configurations, data and runs are relative to the folder in which sbatch was called.

RESTARTS=${RESTARTS:-3}                       # how often lost ranks are restarted within the job
RANKS=${RANKS:-${SLURM_GPUS_ON_NODE:-3}}      # processes per node: one per GPU, or 3 without GPUs
eval "${SETUP:-}"                             # lines such as: module load cuda/12.4; conda activate fl_dist
export PYTHONPATH=$FL_DIST_HOME${PYTHONPATH:+:$PYTHONPATH}

# PYTHON may be several words (a container); by default the repository's environment, otherwise the active one.
python=($PYTHON)
for candidate in "$FL_DIST_HOME/.venv/bin/python" "$SLURM_SUBMIT_DIR/.venv/bin/python" "$(command -v python3)"; do
    if [ ${#python[@]} = 0 ] && [ -x "$candidate" ]; then python=("$candidate"); fi
done
if ! "${python[@]}" -c 'import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, ("torch", "submitit"))))'; then
    echo "error: '${python[*]:-python3}' is no Python with fl_dist's packages: run make install in $FL_DIST_HOME," \
        "or set PYTHON to the command of your environment's Python, or SETUP to the lines that activate it" >&2
    exit 2
fi

# train RUN CONFIG [key.sub=value ...]: run to the end, or to the next interruption; does not return.
train() {
    local run=$1 code=0 step first_node
    shift
    for override; do case $override in run.dir=*) run=${override#run.dir=} ;; esac; done
    run=$("${python[@]}" -c 'import sys; from fl_dist.common.paths import expand_path; print(expand_path(sys.argv[1]))' "$run") || exit 2
    # The console of rank 0 is the job's log; every rank writes logs/rank*.log in the run folder.
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $RANKS ranks and ${SLURM_GPUS_ON_NODE:-no} GPUs per node: $run"
    # One launcher per node, with all GPUs and CPUs of the node, however the job divides them among tasks. srun does not
    # inherit the number of CPUs from the job.
    if [ -n "$SLURM_CPUS_PER_TASK" ]; then
        export SRUN_CPUS_PER_TASK=$((SLURM_CPUS_PER_TASK * ${SLURM_NTASKS_PER_NODE:-1}))
    fi
    unset SLURM_GPUS_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK
    first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # An interruption, by exit code (75) or by the signal itself (138), is no failure here: --kill-on-bad-exit would
    # kill a node that is still saving.
    srun --kill-on-bad-exit=1 --wait=0 --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        ${SLURM_GPUS_ON_NODE:+--gpus-per-node="$SLURM_GPUS_ON_NODE"} bash -c '
        trap : USR1
        "$@" --node-rank "$SLURM_NODEID"
        code=$?
        case $code in 75 | 138) exit 0 ;; *) exit $code ;; esac
    ' node "${python[@]}" -m launch.local "$@" "run.dir=$run" --ranks "$RANKS" --max-restarts "$RESTARTS" \
        --nodes "$SLURM_JOB_NUM_NODES" --rendezvous "$first_node:$((20000 + SLURM_JOB_ID % 10000))" &
    step=$!
    trap 'kill -USR1 $step' USR1
    wait $step || code=$?
    while kill -0 $step 2>/dev/null; do code=0; wait $step || code=$?; done
    if [ $code = 0 ] && [ ! -e "$run/model.safetensors" ]; then
        # The host's Python first: inside a container there may be no squeue and scontrol.
        python3 -m launch.requeue "$SLURM_JOB_ID" || "${python[@]}" -m launch.requeue "$SLURM_JOB_ID"
        exit 75
    fi
    exit $code
}

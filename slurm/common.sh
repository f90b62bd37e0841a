# What the scripts here share: start the ranks on every node, pass signals on, requeue an interrupted run.
# sbatch runs a copy of a script in a spool folder: everything is found from the folder it was submitted from.

PYTHON=${PYTHON:-$SLURM_SUBMIT_DIR/.venv/bin/python}   # the environment, on a file system that all nodes see
RANKS=${RANKS:-${SLURM_GPUS_ON_NODE:-3}}               # processes a node: one a GPU, or 3 without GPUs
RESTARTS=${RESTARTS:-3}                                # times that lost ranks are started again within the job

# train RUN CONFIG [key.sub=value ...]: run to the end, or to the next interruption; does not return.
train() {
    local run=$1 code=0 step
    shift
    for override; do case $override in run.dir=*) run=${override#run.dir=} ;; esac; done
    # The console of rank 0 is the job's log; every rank writes logs/rank*.log in the run folder.
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $RANKS ranks a node: $run"
    # Interrupted, by word (75) or by the signal itself (138), is no failure here: --kill-on-bad-exit would end
    # a node that is still saving.
    srun --kill-on-bad-exit=1 --ntasks-per-node=1 bash -c '
        trap : USR1
        "$@" --node-rank "$SLURM_NODEID"
        code=$?
        case $code in 75 | 138) exit 0 ;; *) exit $code ;; esac
    ' node "$PYTHON" -m launch.local "$@" "run.dir=$run" --ranks "$RANKS" --max-restarts "$RESTARTS" \
        --nodes "$SLURM_JOB_NUM_NODES" --rendezvous "$(first_node):$((20000 + SLURM_JOB_ID % 10000))" &
    step=$!
    trap 'kill -USR1 $step' USR1
    wait $step || code=$?
    while kill -0 $step 2>/dev/null; do code=0; wait $step || code=$?; done
    if [ $code = 0 ] && [ ! -e "$run/model.safetensors" ]; then requeue; fi
    exit $code
}

first_node() { scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1; }

# A job that was cancelled, or that Slurm is requeueing itself, no longer counts as running.
requeue() {
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        echo "interrupted: the job goes back to the queue and will resume"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit 75
}

"""Return an interrupted Slurm job to the queue, unless it was cancelled or Slurm is already requeueing it.

python -m launch.requeue JOB_ID

Uses the standard library alone: slurm/common.sh runs it with the host's Python, for a container has no Slurm commands.
"""

import subprocess
import sys
import time

RETRY_DELAYS_SECONDS = (1, 2, 4, 8)
"""Pauses after which a busy Slurm controller is asked again."""


def is_job_running(job_id: str) -> bool:
    """False for a job that was cancelled or that Slurm is requeueing, and if the controller never answers."""
    query = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"]
    for delay in (*RETRY_DELAYS_SECONDS, 0):
        try:
            return subprocess.check_output(query).decode().strip() == "RUNNING"
        except (OSError, subprocess.CalledProcessError):
            time.sleep(delay)
    return False


def main(job_id: str) -> int:
    if not is_job_running(job_id):
        return 0
    print("interrupted: the job goes back to the queue and will resume", flush=True)
    return subprocess.call(["scontrol", "requeue", job_id])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

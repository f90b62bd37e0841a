"""Whether W&B can be reached from rank 0's node, where a run would send its records from."""

import os
import time
import urllib.error
import urllib.request
from urllib.parse import urlparse

from fl_dist.callbacks.always_on.wandb import resolve_mode
from fl_dist.doctor.checks import Check, Status

NAME = "W&B"
TIMEOUT_SECONDS = 5.0


def check_wandb(mode: str) -> Check:
    """Sends no key, and asks for none."""
    mode = resolve_mode(mode)
    if mode != "online":
        offline = "offline: records stay in the run folder; upload them with fl-dist sync"
        return Check(NAME, Status.OK, offline if mode == "offline" else mode)
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host, start = urlparse(address).hostname or "W&B", time.perf_counter()
    if urlparse(address).scheme not in ("http", "https"):
        return Check(NAME, Status.WARNING, "WANDB_BASE_URL is no http address", "set it to that of your server")
    try:
        urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS).close()  # noqa: S310 (checked above)
    except urllib.error.HTTPError:
        pass  # an answer all the same
    except (OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        advice = "use monitor.wandb.mode=offline and upload later with fl-dist sync; training works without"
        return Check(NAME, Status.WARNING, f"online, but {host} cannot be reached ({reason})", advice)
    return Check(NAME, Status.OK, f"online: {host} answers in {time.perf_counter() - start:.1f} s")

"""Run several configurations in turn in each rank: python -m tests.support.run_several FILE (a JSON list)."""

import json
import sys
from pathlib import Path

from fl_dist.main import main

if __name__ == "__main__":
    sys.exit(max(main(arguments) for arguments in json.loads(Path(sys.argv[1]).read_text())))

"""Several configurations in turn in each rank: python -m tests.support.several_runs FILE, a JSON list of arguments."""

import json
import sys
from pathlib import Path

from fl_dist.main import main

if __name__ == "__main__":
    sys.exit(max(main(arguments) for arguments in json.loads(Path(sys.argv[1]).read_text())))

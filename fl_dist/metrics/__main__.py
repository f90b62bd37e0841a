"""Print every field of the record as a Markdown table.

python -m fl_dist.metrics
"""

from collections.abc import Sequence

from fl_dist.common import terminal
from fl_dist.metrics.keys import markdown_table


def main(argv: Sequence[str] | None = None) -> int:
    terminal.ArgumentParser(prog="python -m fl_dist.metrics", description=__doc__.splitlines()[0]).parse_args(argv)
    print(markdown_table())
    return 0


if __name__ == "__main__":
    terminal.run_program(main)

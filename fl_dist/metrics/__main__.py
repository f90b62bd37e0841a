"""Print every field of the record as a Markdown table.

python -m fl_dist.metrics
"""

from collections.abc import Sequence

from fl_dist.common import terminal
from fl_dist.metrics.record import markdown_table


def main(argv: Sequence[str] | None = None) -> None:
    parser = terminal.ArgumentParser(prog="python -m fl_dist.metrics", description=(__doc__ or "").splitlines()[0])
    parser.parse_args(argv)
    print(markdown_table())


if __name__ == "__main__":
    terminal.prepare_terminal()
    main()

"""The table of all algorithms, computed from their chains.

python -m fl_dist.algorithms [--markdown]
python -m fl_dist.algorithms --memory --parameters 86M   what each needs of the GPUs
python -m fl_dist.algorithms --memory --optimizer adamw  with another optimiser of local steps
python -m fl_dist.algorithms --paper fedlesam            what a paper's methods cost, here and in the paper
"""

import argparse
from collections.abc import Sequence

from fl_dist.algorithms.paper_costs import PAPER_COSTS
from fl_dist.common import terminal
from fl_dist.common.errors import UserError

UNIT_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}


def main(argv: Sequence[str] | None = None) -> int:
    parser = terminal.ArgumentParser(prog="python -m fl_dist.algorithms", description="The table of all algorithms.")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    parser.add_argument("--memory", action="store_true", help="what each needs of the GPUs, in bytes per parameter")
    parser.add_argument("--parameters", type=parse_count, default=0, metavar="N", help="with --memory: of such a model")
    parser.add_argument("--optimizer", metavar="NAME", help="with --memory: of local steps (default: sgd)")
    parser.add_argument(
        "--paper",
        choices=PAPER_COSTS,
        metavar="NAME",
        help=f"what a paper's methods cost, here and in the paper: {', '.join(PAPER_COSTS)}",
    )
    arguments = parser.parse_args(argv)
    for option in ("parameters", "optimizer"):
        if getattr(arguments, option) and not arguments.memory:
            parser.error(f"--{option} goes with --memory")
    if arguments.paper and arguments.memory:
        parser.error("--paper does not go with --memory")
    from fl_dist.algorithms.cost_tables import table_lines  # takes seconds

    try:
        print("\n".join(table_lines(arguments)))
    except UserError as e:  # no such optimiser
        parser.error(str(e))
    return 0


def parse_count(text: str) -> int:
    """A number such as 86M."""
    digits, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    if unit not in UNIT_FACTORS or not digits.replace(".", "", 1).isdigit() or not float(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write it as 1825162, 86M or 1.5B")
    return round(float(digits) * UNIT_FACTORS[unit])


if __name__ == "__main__":
    terminal.run_program(main)

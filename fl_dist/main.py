"""The entry point of every rank: parse the arguments, then import torch and train.

python -m fl_dist.main [CONFIG.yaml] [key.sub=value ...]
torchrun --nproc-per-node 8 -m fl_dist.main CONFIG.yaml [key.sub=value ...]
"""

import argparse
import sys
from collections.abc import Sequence

from fl_dist.common import terminal
from fl_dist.common.key_listing import read_key_listing


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 2 bad configuration, 75 interrupted but resumable, 1 any other failure."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    from fl_dist.run_command import run_command  # takes seconds

    return run_command(arguments)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = terminal.ArgumentParser(
        prog="python -m fl_dist.main",
        description="Federated training: rank 0 serves, the other ranks train; one process alone does everything.",
        epilog=_help_keys(argv) if {"-h", "--help"} & set(argv) else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add = parser.add_argument
    add(
        "config",
        nargs="*",
        metavar="CONFIG.yaml key.sub=value",
        help="a YAML file (default: the embedded quick start), and values of single keys, in YAML syntax",
    )
    add(
        "-h",
        "--help",
        action="help",
        help="show this, with all keys or those of a builder, e.g. model=my_models:resnet",
    )
    add("--check", action="store_true", help="validate the configuration and its data, print both, and stop")
    terminal.add_traceback_option(parser)
    return parser.parse_intermixed_args(argv)


def _help_keys(argv: Sequence[str]) -> str:
    """Every key, or those of the builders that the command line names."""
    words = [word for word in argv if not word.startswith("-")]
    lines = _builder_help(words, "--traceback" in argv) if words else read_key_listing()
    return "keys (type, default, meaning):\n" + "\n".join(f"  {line}" for line in lines)


def _builder_help(words: Sequence[str], with_traceback: bool) -> list[str]:
    """Builders may be the user's: only their code knows their settings."""
    from fl_dist.config.help import help_lines
    from fl_dist.distributed.failures import error_line

    try:
        return list(help_lines(words))
    except Exception as e:
        terminal.print_error(error_line(e), e if with_traceback else None)
        sys.exit(2)


if __name__ == "__main__":
    terminal.run_program(main, is_slow=True)

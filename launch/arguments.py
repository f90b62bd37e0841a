"""Arguments and defaults that several launchers share."""

from argparse import ArgumentParser
from pathlib import Path

DEFAULT_RANKS = 3
"""Per node, without GPUs."""
PROFILES = Path(__file__).parent / "profiles.yaml"


def add_profile_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", help="cluster profile: partition, account, limits, set-up lines")
    add("--profiles", default=PROFILES, metavar="FILE", help="YAML file of profiles (default %(default)s)")

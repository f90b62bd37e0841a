"""Federated learning on clusters: one rank serves, the others train; the same bits on any number of workers."""

import logging
import os

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"
PARENT = os.getppid()
"""Who started this process, asked before the imports that take seconds: by then it may have died."""

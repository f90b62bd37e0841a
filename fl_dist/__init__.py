"""Federated learning on clusters: one rank serves, the others train; the same bits on any number of workers."""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"

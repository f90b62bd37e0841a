"""What a run records: one typed record per round, the file that holds them, and what they amount to."""

from fl_dist.metrics.record import Norms, RoundRecord, Seconds, Spread, WorkerRecord

__all__ = ["Norms", "RoundRecord", "Seconds", "Spread", "WorkerRecord"]

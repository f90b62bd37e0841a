"""Every record to `metrics.jsonl`, on disk before anything else shows it."""

import logging

from fl_dist.callbacks.base import Callback, RunContext
from fl_dist.metrics.file import MetricsFile, MetricsLostError
from fl_dist.metrics.record import RoundRecord
from fl_dist.metrics.summary import Summary

log = logging.getLogger(__name__)


class MetricsWriter(Callback):
    def __init__(self, file: MetricsFile) -> None:
        self.file = file

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        try:
            self.file.append(record)
        except OSError as e:
            log.warning("metrics.jsonl could not be written: %s; the record is kept and tried again", e.strerror)

    def on_run_end(self, summary: Summary, context: RunContext) -> None:
        if not summary["finished"]:  # the checkpoint holds what could not be written
            return
        try:
            self.file.flush()
        except OSError as e:
            missing = len(self.file.unwritten)
            raise MetricsLostError(
                f"the model is written, but metrics.jsonl lacks {missing} records: {e.strerror}"
            ) from None

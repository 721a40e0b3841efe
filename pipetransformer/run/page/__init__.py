"""``report.html``: a run, or several beside each other, as one page that needs nothing else."""

from pipetransformer.run.page.history import TIMELINE, History, read_history
from pipetransformer.run.page.page import write_report

__all__ = ["TIMELINE", "History", "read_history", "write_report"]

"""One run: job, folder, checkpoints, totals and report."""

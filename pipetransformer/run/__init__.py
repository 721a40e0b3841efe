"""One run: its job, folder, checkpoints, totals and report."""

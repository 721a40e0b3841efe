"""One rank at work under one plan: layout, feed, step, evaluation, weights."""

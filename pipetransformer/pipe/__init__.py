"""AutoPipe: measured unit costs in, the cheapest plan out, and the stages that run it."""

"""Updates: the optimizer, its tiles, the jobs in flight, clipping."""

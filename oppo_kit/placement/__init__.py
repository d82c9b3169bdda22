"""Where a scorer runs. The engine sees futures only."""

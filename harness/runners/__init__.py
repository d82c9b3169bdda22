"""One module per runner; each trains the same workload in a process of its own."""

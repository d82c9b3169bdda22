"""Benchmarks, training runs and their reports on top of oppo_kit."""

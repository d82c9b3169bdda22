"""Turns what was recorded beside a run into the results file's types and into figures of a window."""

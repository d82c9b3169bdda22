"""Generators and scorers on real models. Each optional dependency is imported in its one file."""

"""Turns train batches into weight updates, on accelerate."""

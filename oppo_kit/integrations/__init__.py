"""Overlap inside other people's trainers. Nothing here is imported before it is asked for."""

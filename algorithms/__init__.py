"""Algorithms that ship with oppo_kit, one file each. The engine finds them by entry point, like anybody's."""

"""``oppo-kit bench --dry-run``: what a run would hold, cost and lack, on hardware that need not be here.

Nothing is loaded, measured or downloaded. Parameters are counted on PyTorch's meta device; the rest is arithmetic.
"""

"""``make gpu-check``: PPO on models of 3 and 7 billion random parameters, by every runner, on one large GPU.

Needs no network and no downloaded weights: ``make gpu-bundle`` collects the wheels that such a machine lacks.
"""

"""Trains the shipped ``tiny`` assets from scratch: a rewrite-chain policy and its reward model.

Stages, each writing below ``--work-dir``: ``clean`` (a language model of right responses) ->
``oracle`` (the same after wrong steps too) -> ``policy`` (the clean model, made careless) ->
``samples`` (its responses at several temperatures) -> ``sharp_samples`` (more of them, with less noise
and longer) -> ``reward_1`` to ``reward_4`` (a verifier on top of the oracle, in four rounds) ->
``responses`` (of the policy, to held-out problems) -> ``evaluate`` (held-out figures) -> ``ship``.
``all`` runs them in this order; every draw is seeded and every length is a number of steps, so the same
versions and one thread remake the same weights up to floating point.

    python -m harness.assets.make_tiny all --output-dir harness/assets/tiny

It knows nothing of the trainer, and nothing is done at import.
"""

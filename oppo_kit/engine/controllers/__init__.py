"""Decide from what steps report what the next step uses: Δ, and when responses are scored."""

"""Small models that ship with the harness, and the scripts that made them."""

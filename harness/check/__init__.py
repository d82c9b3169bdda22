"""Did a run learn as a reference did? Convergence equivalence as a regression check."""

from harness.check.equivalence import Comparison, Quantity, compare, seeds_needed
from harness.check.report import assert_equivalent, require_equivalent, sentence_of

__all__ = [
    "Comparison",
    "Quantity",
    "assert_equivalent",
    "compare",
    "require_equivalent",
    "seeds_needed",
    "sentence_of",
]

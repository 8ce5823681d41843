"""Scripts that measure, run from a checkout: ``make bench-package`` and its like."""

"""Commands about what a run left, and about removing it."""

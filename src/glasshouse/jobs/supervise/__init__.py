"""A run from its preparation to its end: start, follow, stop, give up, sweep."""

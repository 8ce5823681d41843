"""The decisions on lines: the release of a leg, what counts as a checkpoint, and the owner's calls."""

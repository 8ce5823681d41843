"""Of receipts above the level `software`: the bundle is made whole, and the appraisal of its hardware is repeated."""

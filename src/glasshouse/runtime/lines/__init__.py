"""A leg of a line: what its checkpoints are bound to, how they leave the machine, and how the next one gets them."""

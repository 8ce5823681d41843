"""The cases of the vectors of lines and their checkpoints; `generate_checkpoints.py` writes them."""

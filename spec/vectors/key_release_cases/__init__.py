"""The cases of the key-release vectors; `generate_key_release.py` writes them."""

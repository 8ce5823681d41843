"""One run from start to wiped; start at `lifecycle`."""

"""The owner's state on this machine: the home, its private files, keys, known owners and run folders."""

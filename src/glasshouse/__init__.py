"""Glasshouse: train on machines you do not trust, and show afterwards what happened there."""

__version__ = "0.1.0"

"""Machines: accounts at providers, rentals, and the place on each machine where a run goes."""

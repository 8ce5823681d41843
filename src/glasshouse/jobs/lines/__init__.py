"""Runs that go on at another machine: what may go on, from where, and what replaces a machine that was lost."""

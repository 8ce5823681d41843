"""Carries operations out over a group's connections: the thread that waits for a result does the work."""

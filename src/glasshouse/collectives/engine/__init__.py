"""Carries operations out over a group's connections: the thread that waits for a result does the work.

Law: the first failure ends the group on every rank, with outputs zeroed and keys dropped.
"""

"""What protection costs: design, records, exclusions, estimates and claims, as values (spec/overhead-artifact.md).

Nothing here reads a clock, starts a process or opens a file: the slice engine that does so calls these
modules, and `glasshouse verify` calls the same ones on what the engine left.
"""

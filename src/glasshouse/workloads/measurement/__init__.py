"""Measured jobs: a schedule of slots, and the record of the steps in them (spec/measurement.md)."""

"""Runs a measurement: starts both arms, alternates them slice by slice, and writes down what they report.

The numbers that follow from the slices are made in `glasshouse.bench.overhead`, which sees no clock and no process.
"""

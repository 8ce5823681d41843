"""What protection costs a training step: from the records of two workers to one number, its interval and one word.

Laws: nothing in `glasshouse` imports this package; every module beside `harness` and the commands is pure.
"""

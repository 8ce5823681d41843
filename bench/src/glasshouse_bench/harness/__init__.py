"""What runs a measurement: two arms side by side, a look at the machine meanwhile, and the notes of each session.

Law: no channel leads to an arm but those that an ordinary run has; the harness waits, looks
from outside, and reads what came back.
"""

"""Trainings that go on over several machines: where a leg begins, what it seals, and what is signed about it."""

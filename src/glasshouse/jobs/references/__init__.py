"""Installations that an owner accepts: their reference values, of machines, images and releases."""

"""What the worker is confined by: filters, mounts, limits, and trials of what must be closed."""

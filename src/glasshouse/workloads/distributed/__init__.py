"""A job in several ranks, on one machine or several: their processes, connections and store."""

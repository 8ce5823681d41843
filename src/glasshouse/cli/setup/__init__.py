"""Commands about what an owner has: keys, gates, machines, references."""

"""The workloads that come with Glasshouse, and what only they use."""

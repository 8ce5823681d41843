"""The worker: one program that runs a workload, for both legs."""

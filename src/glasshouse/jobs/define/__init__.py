"""A job before it runs: the job file, the files that go into its package, and the sealed package."""

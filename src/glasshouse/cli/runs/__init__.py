"""Commands of a run, from the job file to its end."""

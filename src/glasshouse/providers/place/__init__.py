"""The owner's end: places on this machine, behind ssh and in Slurm jobs, and the runs there."""

"""The store of checkpoints, in the gate's process (spec/checkpoints.md section 4)."""

"""One rank's part of a checkpoint: sealed by the agent, unwrapped by the custodian, read by the worker."""

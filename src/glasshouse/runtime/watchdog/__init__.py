"""The process that looks for debuggers, and the agent's look at it."""

"""The sandboxed worker: how it starts, and what it sends."""

# Of the worker's init and the agent, which do not import each other.
STATUS_BYTES = 4  # of the worker's wait status, which it writes last
# How long it waits for a beat: longer than a slow disk takes for what the agent writes at once; the agent beats once a
# second from the first beat on.
SILENT_S = 60.0

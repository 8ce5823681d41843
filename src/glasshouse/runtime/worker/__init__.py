"""The sandboxed worker: how it starts, and what it sends."""

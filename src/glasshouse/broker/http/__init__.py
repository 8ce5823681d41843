"""The HTTP service: listeners, bounded connections, intake of messages, routes."""

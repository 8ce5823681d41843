"""handshake."""

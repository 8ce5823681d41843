"""What both ends of a channel use: frames, messages, carried calls, and the line to a gate (spec/place.md)."""

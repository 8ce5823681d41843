"""The rented machine's end of a channel: serves a place, keeps runtimes, stores what they leave."""

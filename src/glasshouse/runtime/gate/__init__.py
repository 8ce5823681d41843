"""The connections of this machine: to the broker, and between the machines of a group."""

"""The owner's clients of a broker, and a broker as a child process."""

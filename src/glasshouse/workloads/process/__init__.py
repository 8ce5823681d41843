"""What a process that holds plaintext sets up before anything else, and how it reports a failure."""

"""What commands print: JSON for programs, text for people."""

"""Google Confidential Space: a token in which Google says what it saw of a machine of its own."""

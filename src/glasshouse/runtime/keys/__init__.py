"""Keys and what is sealed with them, and the search for what they left in memory."""

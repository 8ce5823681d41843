"""Intel TDX: a strict frame around the quote, its signatures and certificates, and what the report says."""

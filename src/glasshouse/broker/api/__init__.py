"""What both ends of the HTTP API share: problem documents and the audit chain, without database or server."""

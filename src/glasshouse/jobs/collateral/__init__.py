"""What vendors publish to check hardware evidence by: fetched by its owner, shown, and checked before it is needed."""

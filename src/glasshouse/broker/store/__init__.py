"""The durable state: database, keys at rest, audit log, quotas, and what each caller may see."""

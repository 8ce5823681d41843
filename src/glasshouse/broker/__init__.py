"""The owner's side: package keys at rest, challenges, decisions, audit, and the HTTP service around them.

Laws: every decision is one database transaction together with its audit record and its stored answer, committed before
the answer leaves; any evidence that names a challenge consumes it, whatever the outcome; nothing is stored for a
request that proved nothing. No secret is logged, audited or kept unwrapped on disk.
"""

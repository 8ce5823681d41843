"""The decisions: challenges, releases, countersignatures, and the requests of owners."""

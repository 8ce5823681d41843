"""Evidence -> verdict: claims, hardening, measurement, policy, and the roots of trust.

Laws: *genuine* (`verify`, `roots`) and *acceptable* (`appraise`, `policy`) are different questions in different files.
Nothing here reads a clock, a socket or the environment; `measurement` alone reads files, those of the installation that
runs it. Absence never means yes.
"""

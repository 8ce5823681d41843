"""Evidence -> verdict: claims, hardening, measurement, policy, and one module per root of trust.

Laws: *genuine* (`verify`, `roots`, `software`) and *acceptable* (`appraise`, `policy`) are different
questions in different files. Nothing here reads a clock, a socket or the environment; `measurement`
alone reads files, those of the installation that runs it. Absence never means yes.
"""

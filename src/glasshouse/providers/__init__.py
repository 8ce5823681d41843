"""Places where runtimes run: rents and returns machines, and hands the launch file over.

Laws: a provider gets bytes that it does not read, sealed files and a command; it can never touch a key or
plaintext (import contract). Nothing secret goes into an argument or the environment.
"""

"""Attacks on a live gate, over real HTTP.

Laws: the broker is a process like any other, with its own data directory; the attacker holds a stolen launch file and
makes keys of their own, so that everything they change is signed again; each attack must be refused by the one check
that it is about, and the broker's own release counter shows whether it was.
"""

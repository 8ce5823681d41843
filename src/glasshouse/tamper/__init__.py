"""Attack stories told to a live gate, over real HTTP.

Laws: the broker is a process like any other, with its own data directory; the attacker holds a stolen
launch file and makes keys of their own, so that everything they change is signed again; each story must
be refused by the one check it is about, and the broker's own release counter says whether it was.
"""

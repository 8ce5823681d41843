"""The story, on the owner's side: seal → place → attest → release → train → collect → verify.

Laws: the owner's private keys and package keys are decrypted here for as long as one step needs them
and go nowhere but into HPKE messages, signatures and the broker's 0600 socket. State lives in a
home and the projects' `.glasshouse`: folders 0700, files 0600, each written whole or not at all. Nothing here
needs Linux, except placing a run on this machine.
"""

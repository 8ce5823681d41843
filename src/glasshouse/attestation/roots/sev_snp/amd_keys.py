"""The keys of AMD that every report of a processor leads to, of each product: pinned, never taken from evidence.

Laws: an ARK signs itself, ASK, ASVK and the revocation list of its product; an ASK signs VCEKs, an ASVK VLEKs. That ASK
and ASVK are signed by their ARK is tested with the certificates that AMD publishes (https://kdsintf.amd.com).
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey, RSAPublicNumbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """A certificate of AMD's, as far as it is used."""

    name: str  # common name of its subject; the rest is the same in all of AMD's
    serial: int
    ends_s: int
    modulus: int  # of 4096 bits; the exponent is 65537

    @property
    def key(self) -> RSAPublicKey:
        """Its public key."""
        return RSAPublicNumbers(65537, self.modulus).public_key()


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A line of processors, which has keys of its own."""

    name: str
    ark: Authority
    ask: Authority
    asvk: Authority


def _authority(row: str) -> Authority:
    name, serial, end, *modulus = row.split()
    number = int.from_bytes(b64decode("".join(modulus)), "big")
    ends_s = int(datetime.fromisoformat(end).timestamp())
    return Authority(name=name, serial=int(serial, 16), ends_s=ends_s, modulus=number)


def _product(name: str, rows: str) -> Product:
    ark, ask, asvk = map(_authority, rows.split("\n\n"))
    return Product(name=name, ark=ark, ask=ask, asvk=asvk)


# Of each product ARK, ASK and ASVK: name, serial number, end, and the modulus in base64.
PINNED = (
    _product(
        "Genoa",
        """
ARK-Genoa 20000 2047-01-26T15:34:37Z
3Cd95S/uFOuRIskW9vz9VDBF69NDQF79oRhL/L2PVQGhK3YdfEBgpF/JiwWFBsT/fXDhzA01p3LkcT/7LdjcRfKXjHl+0Qq/M4dZkh6QDoUeKzNBLDcBKD
DGWo3v35NyrxbA1DnkYwUKU5AAk4P94tKXLp80oxt84ahyHoLmc/LqsGsp+oq1Bz4PPsYLwTG4iMKVaaT90/oZ4I8oibSru92vJhlqWO27d/Rxc3iUMyhN
eGToOvgx/iUo4gGpG61NDpkEUvIzuKcaMx8IdTpWg2DF6SwF0IgVMffnvtJmA68BwJNWo1E4PLJdaPfBifcJpuBFwNVQIPQEVX3aP89HJSp8YbY9lySS6P
lVEqTBBtaQmi4ATGmMR+n2K/e+JAhU2Gj7jIpJhOkdH9firQDnmlA2SFfJ/Cc0mGNzW9RmIhyOUnNFoclmkRhl3/AQU5Ys9Qsan1jT/EiyT+pCpmnA+y9e
dvhDCbOG8F2oxHGRdTBkylungrkXJGYiwGrR8kaiqv7NN8QhOBMqYjcbrkEr0f8QMKklIS5ruOfqlLMCBw8JLB3LkjpWgtD7OpxkzSsohN47Uom86RY6lp
72g8eXHP1qYrnvhzaG1S70vw6OkbaaC9EjiH/uHgAJQGxon7u0Q7xgoREWA/e7JcBQwLg80Hq/sbRuqesxz7wBWSY254c=

SEV-Genoa 20002 2047-10-31T13:33:48Z
oHJhvk4Fwwkwb03AMfLySXJSXmEaCZMTRbLgPaj4oEzaD9tGfxCSw/nsCAiXHQaWUt++bnbjJO05TKT5d+Cdrz4/fiRBpbhf0xzvh11O+wJTBPj3uCzDm4
8vEZ8l5SXMO4wd/QqwsrejFERPD/Hdfv1mGCMW7ac0ug8trDzqGe+l+p8NMjp/EqBDY2vd8hLaVLmS+XjAqlYVNRksh9aTzSYL19/cTrBDmqQ2y8k23zNl
2lW6q/BtQOpWGVs3EWvBHb/Qnf3f3S9+lC4H2jdDy9yn7kqyTWq4WCBnE4qhYJRokulYtzMZM1Ilk4Z6RPkOTR1MJ4gdFtj7lKmrkSuOoJYmqhJIsQJ854
lAbJybgU7zyzWAwu3uaslkYKUEAQf2ja5Hyl3IBqOzpqY31SpKzbl8NXveZybRMklwfe4iDLI25T9ku9CVetDYifCbdGeuHdTwZBBemW4NE57L7iEV8+zz
8nxng8OMX//4pXntWqmQbEAnBLv2ToTgd1H2zYRthyDLc3V119/+FnTW17LK6bKzTCgEnCHQEcAt0hDQLLF799+2lZTxxfBEoduAZax6IjgAMCi6e1ZfKP
JSkdvb2m3BwfP8bniG7+AEJv1WOEmnBJc1pVQCttbJUodbi07Vfen5JRUqAvSM3ObWQOzSAGzsGnpIigwFpW6m9F7uYVU=

SEV-VLEK-Genoa 20101 2047-11-18T20:48:34Z
zL2/xihHscEpxS3+OsQZpAuNIJGSEQZrkoWPtqKMjjZOyXMMRHAheTm56Ei0Mb8TJZlbGDS5x/AdbowstGmpHqh2zvSvjZO7V4v6Ft84p71P6GXfOVEQgC
uatiszfIwFrRQk/cmU7HuJadBq6XtYE+qBJMjus8C0WwW/IWY9j6pNbEA1SnUvVg6t89zfE+AcB5UDCKq09x7qw+rPt9pTpEch0f1bHdRFJlpgWGTq02oh
H9bT+6au8kPpvMa3m2p8zdIIqtuuSG6srIimrpt24lsr4tLhQG65R/RbVJT9MsK4ULpbAUO5NwdlLwbnpLWHiUwoYrySMD8l3xRDvhPmInlXEFEo8lahcY
llxiJJR8oqqA6x3jPFKmkfhEgaQefcn4P8nA4SScqAoLihn75iiDtU2+ZlkPnKgcNs5U1Le441ypen2n7BOnRyhmwyAUBGk3OcMXHsJ6KGpDJyTVCaC3fW
X3ex4Iv4LkuKRA6O9yu3zHP23N/ubE8/YykffIjMbtBoOAzdWCn9lE4amo4VZ+8ewIutZAYmC5TIQO+wWUqKYr0iAobccMnZdJjUORjVoqVQ+dLr+/1otk
36gfPc0LpmhWZKfAXF9sgvYtQjcaR9wlGr8ySRtZ2YJWofuR7zgYFJPEXRwAnbAR/05hBmog7CMt1F9YKSmku6JfRecY8=
""",
    ),
    _product(
        "Milan",
        """
ARK-Milan 10000 2045-10-22T17:23:05Z
0Ld52RJOdeiJlqK2JdsVmD7FktuotWwX1fNgW41XY9Xz1HEhSUmhLz9Cu9DHRlvgJSNxbeYYsnJfvyjx1MfU0V5tkKiU1EesNFta1kTA0szNisdYc9isqk
7mXT5+KfGRbfc4V/9zRIcE8jlHN61S1ju8X93+6dxDUrG2SzxqJ4BhqyYmUDruPXJSX4vUc01P7j98MpqOS95rORdGHeI52Naz5m2B+O+vjsC060d37jY9
LFeuOP4Meri8qgfi2S5kKqg/aF6aPtuAZQVR7u3KFYXP59XmJgtcog05gmI0T/OitLhuzVvpZcLph0odh/1IPXqx3+MnjD97A7fXpqGd/y8KxX7jksTEzA
OgbKAeam3lm+3yKIcTYMlsRMXPcjNbIvmsBykD//xSniusuHBkgnlENEWx1UcbQQrs+gVDkuVPhsnzIRNgYvM48Y+7LGiJYnrmE8xcrexekBxrva2V9TJQ
qnN3Q53kt5viQi3+gCfmkwC0F0tirIZbLkXPrPwzZ0M9eNxhIySb2npJfgnqz55I0u33wh4r0ZNQeTGfw03MBUtyuzGesGkcw+loqMaq1qR4tjGbPYxCvp
Cq7+OgpCCoMNit2uLo9M18fHz10lOMT8nWAUvRZFzteXCm+7PHdYPlmQwUw3LvenJ/ILXoQPHfbkH0CyPfhl1jWhJFZas=

SEV-Milan 10001 2045-10-22T18:24:20Z
nU2drrNTfbhNQIllf+W2y+ROCbSzId1aKZft2T9zjZQOzjGccl17i1mIKWl7NTcB0VYXt3JxZSzOZjsjLNVAEN2MGj9TiedL+QewKZX0JmQEuYjm+WKksL
txgdLp9E7EZNwNDqV1r0qRP5tB8OWkyQbIdLeu4aCz7j/Sl1FkBytev9sbFGzt7cwnjzi9m7noqsk+uRVBp3+In35QPdcj8YflEmnHBNvuUDJhLCJMW8KO
jP6++Phbs3iCitJcANEtW4qTNFoKW3CHlbcSCjTM8KsNbUx3A8ek5EVLjZWH1pt9E3TfpR6XyfQKnY6kl5aEIPwdW3eFYaqCFPrIo9pQT6WuDSP4JCYJbZ
neKKIbZjzXkJt3NQG32EukYImBb9SCkm9+fS5LZFg9ojzubMX3+NkBoSXI7OPvnHMxjup9mw5se6QUV7GqpCA2TNypolmuQ+cAaxV7JqHE8dl9pWf+Y3ar
b+9iiFCwFt4lAlJw5D0CTRTC1Y5YWFDBCrA/vGnmTnqG8C+jjUAS7cjjR8q4OPhyDmJRPnaC/ZG5uP0K0z6GoO/3uen9wqshCuHegLTpOeHEJRKrQFr4PV
IwVOB0+ebO5FgoyOw43nyFD5UKBDxEB4BKo/0uAiKHLRvvgLbORbU8KARIs1EoqEjmF8UtrmQWV2hUjwzqwvHFei8rPxM=

SEV-VLEK-Milan 10101 2047-11-16T22:45:24Z
1EUWkz5FTPz+uWT2hCEyisam8FRuXZAmS3l+rXgSCeS1Q0+1olcnFSJpiwfssfhoutJqePyicu+OhkX131PMeO/VOtH3upK4YNJmq36IJp7ZWIm5nK2fJN
kYEHW0m/NXcIA9U2iHl5bAQ5cbGp97/FaOJ4VmGoTMV658Yox/plFmZRFfRcsw2hyNhqUl1gzdpnIIgPkygUovFEgaa0IVSgGLHQhZQiebNLLSVWRVReve
0t94zlRIRRdrz84cckP9H9DTAUMyQaxSZbPINKbV6TPmtrwAV9UP1Qq418xn9I+C0SsWutP/5S1OiL8OTzQ4CvgbHOfd2F3yVv4xDBza4SelF2igoDf+BF
4XI/IIHJL2N5uKy3+gkSB2Xl6prohgVmqRFvBW9OTCEa32WhXu0t1Z1abEKDZ3LpZt9/Crg6zyPpXDLR/tLHHpSaPRj7CTzHieKMTz+Q6RrCCQcHGfaAD/
ETNY56aHvNJRZgbzXDUJvnLr3dYyOvvn/DtKhCSimJynn7Len4ArDVQVwXRPe3hR/asCE2CajT7kGC1AOtUzQuIKZS2D0Qk74g297JhLHpEBlQiyjRJ+LC
WZNx9uJcixGyzav6fiOWx4U8uWhRzHs8nvDAdcS4LW31tPlA9BeOK/BGimQTu7hM5MDFZL0C9dWK5puCUJex6I2vSqvyc=
""",
    ),
    _product(
        "Turin",
        """
ARK-Turin 30000 2048-05-15T20:03:12Z
waAriB7EIuVc4ZB1wD3YfDxL+9eyS7+izm0Jj3W772NINCWl8Bj3w/JD2ZjmbRxWdIq/4d9iarCKorXloJUB1jRdgxqccTx1aOoig4+2w1XhVVJT7K457w
T5ZLNJgQaxqa9Etkwjd6+9sOhlCDE9l43kQ0R2BikVJa/uyyVOSwEk5w5tXKOuG9jvq6QtAMJasW38wlqRDaKEGtZ9VUgGon27ZuL4sTJuC/azz9/iQBw8
kEilzOl95AiTkeY5jSEBDWbAqnZk5qlM7kISKG20kgQm14mhNKDI2p2oua+zuAG7i52epoRF2GfU0TYk/yf+vCNB2tnechFQuP2e8bLk95ZdqPi9/UWw4J
XjtdEA4u2JYplSSUPQVAXKt6LVqujtJcM59JKr2u0XQ75KwxcMp15gSXhBfInvPAwuAY4dEwwGqT8oIg4esPHwEsmChhYeDIxPG9R4fx9O0q6p8Gb+HXlT
iS47P9YNeOpidOUKzDl/S1OvyhDtSL8LJc24QATFydo/iD/KUdvFTRlD0crkAMkZLoWQ8hLDGc6BZJXsdd7Zf2e4UW3tI/1oh/2t23Ot3zyhTcv5gDbABu
0LjVe98uRnS15SMwK//lJt9e5BqKvgABkSoABf+B4VFtPVEX0ygrYaFaI9i5ABrxnVBmzXpRb21iI1NlNCfOGUPIhVpWE=

SEV-Turin 30001 2048-05-15T20:25:21Z
nvg5Grv2Emd9lAhKdO64RXU3UESb6JTm0Hhzevx1PyxinxYqJL329qTJM0XmdozLYb7rsHxgM5I2pU18M8gect2pN/YB2LQ1/bIq37TPDbg7ym0MN6KkZ6
aERxAX0voYtdDyNxjDAUjpRpCe1FccAev/Es2n/Fz1G1TmC2XepTQqaKpmt6mnDWSCHCVsQoY0gSibeaG6doM6OiNUCbKXaC7KHH5b/96BD1DJ84M+JHqP
ClFhHqUJwzKF5Qxj4wgWAZzK8UPhiNGjrF6+TBdlFGdSzEqw1jOrCTHduYyLK+5OQ3OIw4S+vZeOVoxJajTIWdsqYP2DLc0HkL0qWOumEOrrc2/4DeETSh
B0MyIpH05kSalyQN2eN5P6ptOB84hddCdbJPEepnD+FqQap1ukw3K8uBcgeBSAF23r6UtT8Uc5h7MsWX3MoZiEHcSkDQQ8IedTk7CLjsK6S7b/lfKqfYiR
hKgGkRvsEd/MDNcumHZKIgzasJwgagzSggiUo9jXp3EWm84fqyxNXzSutPB7qD5P/ULAB+q9QgvrzC8XneaLP0MNrHhM80UejmsBTIktMvFoWVIelYDLdc
oi0eMD5DRccfsgrYaY6h/+/qf9tgg+mX09UJpuSPRF38oyqnNNFMl5v/tWLgUsChPU6NCQC17Qaqr8mu2ynyyuHEs5JVU=

SEV-VLEK-Turin 30101 2048-05-15T21:09:41Z
pjrui4l0ZogEh0fDdVfJ4unowGGolk2wXyzjbjC/fnqlhFqiFj1JSKdkYSvzPVfgDR0MU2WLlytrAGqOHYBdk4Moz3xHTXJus75Nef0EBZpGk9M4PQGF+n
TqYi+hDguq14wQUEltN9wGunnUeaMz0e6hfCasDevkypILMponvTvaM49RAipCvTgmPRTkQA8hjl3tA6R7S/HKTn6/Q3T74A0BfygK49LLkdHF05Wo0pZ9
qmPyhi0Rh9epY0L+/T2e17fohWcCavgE+KF5GO5XINzunwKolCCyH3930iAmb1vv5v4PimnGsfH4ic4kIApR1hZApU3YG3qUE84qkb5SEASQsTZCT0Jv/A
xC9So5h2wraVzWz6GvpPHEtRKvue5vehkwPjFipJMT5Z7CmNuXc+0lcVSZMHSbswFSHKKtp4F0UDoPnuIWw/djGDjkGXS9W5M2N3zVSbn94cJxCMzOTzIL
hcX/lJatooslfxvqucFH8PpS9xBMhuN4fTPlNk/oVbQ6w8pxEMibo0K8Q+gOqqzdVm6i7jotobsuYxH1Httjsc61vSskSDT4JkPjqTWiyOmsFI+6Ob/hya
/fqpe0EPy68TPk85COC7uqNMzu58xb0uAtt0beejDx29mRRbiPNL5tnwK9KFmZDpeZWSZgzvn2K+SQTK80ZKn8Yq2SKfU=
""",
    ),
)

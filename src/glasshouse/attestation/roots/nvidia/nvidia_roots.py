"""NVIDIA's roots, which are pinned: of its devices, and of the manifests of its drivers and firmware.

Source: verifier_device_root.pem and verifier_RIM_root.pem of github.com/NVIDIA/nvtrust at 02817309.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaRoots:
    """Certificates, DER."""

    devices: bytes
    manifests: bytes


PINNED = NvidiaRoots(
    # NVIDIA Device Identity CA
    devices=base64.b64decode(
        "MIICCzCCAZCgAwIBAgIQLTZwscoQBBHB/sDoKgZbVDAKBggqhkjOPQQDAzA1MSIwIAYDVQQDDBlOVklESUEgRGV2aWNlIElkZW50"
        "aXR5IENBMQ8wDQYDVQQKDAZOVklESUEwIBcNMjExMTA1MDAwMDAwWhgPOTk5OTEyMzEyMzU5NTlaMDUxIjAgBgNVBAMMGU5WSURJ"
        "QSBEZXZpY2UgSWRlbnRpdHkgQ0ExDzANBgNVBAoMBk5WSURJQTB2MBAGByqGSM49AgEGBSuBBAAiA2IABA5MFKM7+KViZljbQSlg"
        "fky/RRnEQScW9NDZF8SXgAW96r6u/Ve8ZggtcYpPi2BS4VFu6KfEIrhN6FcHG7WP05W+oM+hxj7nyA1r1jkB2Ry70YfThX3Ba1zO"
        "ryOP+MJ9vaNjMGEwDwYDVR0TAQH/BAUwAwEB/zAOBgNVHQ8BAf8EBAMCAQYwHQYDVR0OBBYEFFeF/4PyY8xlfWi3Olv0jUrL+0lf"
        "MB8GA1UdIwQYMBaAFFeF/4PyY8xlfWi3Olv0jUrL+0lfMAoGCCqGSM49BAMDA2kAMGYCMQCPeFM3TASsKQVaT+8S0sO9u97PVGCp"
        "E9d/I42IT7k3UUOLSR/qvJynVOD1vQKVXf0CMQC+EY55WYoDBvs2wPAH1Gw4LbcwUN8QCff8bFmV4ZxjCRr4WXTLFHBKjbfneGSB"
        "WwA="
    ),
    # NVIDIA CoRIM signing Root CA
    manifests=base64.b64decode(
        "MIICKTCCAbCgAwIBAgIQRdrjoA5QN73fh1N17LXicDAKBggqhkjOPQQDAzBFMQswCQYDVQQGEwJVUzEPMA0GA1UECgwGTlZJRElB"
        "MSUwIwYDVQQDDBxOVklESUEgQ29SSU0gc2lnbmluZyBSb290IENBMCAXDTIzMDMxNjE1MzczNFoYDzIwNTMwMzA4MTUzNzM0WjBF"
        "MQswCQYDVQQGEwJVUzEPMA0GA1UECgwGTlZJRElBMSUwIwYDVQQDDBxOVklESUEgQ29SSU0gc2lnbmluZyBSb290IENBMHYwEAYH"
        "KoZIzj0CAQYFK4EEACIDYgAEuECyi9vNM+Iw2lfUzyBldHAwaC1HF7TCgp12QcEyUTm3Tagxwr48d55+K2VIlWYIDk7NlAIQdcV/"
        "Ff7euGLI+Qauj93HsSI4WX298PpW54RTgz9tC+Q684caR/BXWEeZo2MwYTAdBgNVHQ4EFgQUpaXrOPK4ZDAk08DBskn594zeZjAw"
        "HwYDVR0jBBgwFoAUpaXrOPK4ZDAk08DBskn594zeZjAwDwYDVR0TAQH/BAUwAwEB/zAOBgNVHQ8BAf8EBAMCAQYwCgYIKoZIzj0E"
        "AwMDZwAwZAIwHGDyscDP6ihHqRvZlI3eqZ4YkvjE1duaN84tAHRVgxVMvNrp5Tnom3idHYGW/dskAjATvjIx6VzHm/4e2GiZAyZE"
        "IUBDOKPzp5ei/A0iUZpdvngenDwV8Qa/wGdiTmJ7Bp4="
    ),
)

"""Messages to seal and open: the RFC's, and random ones in memory whose surroundings must not change."""

from __future__ import annotations

import random
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from glasshouse.collectives.kernels.cipher import Message

# RFC 8439, 2.8.2
SUNSCREEN = (
    b"Ladies and Gentlemen of the class of '99: "
    b"If I could offer you only one tip for the future, sunscreen would be it."
)
SUNSCREEN_SEALED = bytes.fromhex(
    "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
    "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
    "3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691"
)
# RFC 8439, A.5
DRAFTS_SEALED = bytes.fromhex(
    "64a0861575861af460f062c79be643bd5e805cfd345cf389f108670ac76c8cb24c6cfc18755d43eea09ee94e382d26b0"
    "bdb7b73c321b0100d4f03b7f355894cf332f830e710b97ce98c8a84abd0b948114ad176e008d33bd60f982b1ff37c855"
    "9797a06ef4f0ef61c186324e2b3506383606907b6a7c02b0f9f6157b53c867e4b9166c767b804d46a59b5216cde7a4e9"
    "9040c5a40433225ee282a1b0a06c523eaf4534d7f83fa1155b0047718cbc546a0d072b04b3564eea1b422273f548271a"
    "0bb2316053fa76991955ebd63159434ecebb4e466dae5a1073a6727627097a1049e617d91d361094fa68f0ff77987130"
    "305beaba2eda04df997b714d6c6f2c29a6ad5cb4022b02709beead9d67890cbb22392336fea1851f38"
)


def room(size: int, skew: int = 0, *, data: bytes | None = None) -> torch.Tensor:
    """Return `size` bytes at an address of that remainder modulo 16, between bytes that must not change."""
    around = torch.full((size + 64,), 0xA5, dtype=torch.uint8)
    start = 16 + (skew - around.data_ptr()) % 16
    inside = around[start : start + size]
    inside.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    if data:
        inside.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return inside


def untouched_around(inside: torch.Tensor) -> bool:
    whole = torch.empty(0, dtype=torch.uint8).set_(inside.untyped_storage())
    start = inside.storage_offset()
    return bool((whole[:start] == 0xA5).all() and (whole[start + inside.numel() :] == 0xA5).all())


def message(size: int, extra: int, skews: tuple[int, int] = (0, 0), **given: Any) -> Message:
    parts: dict[str, Any] = {
        "key": random.randbytes(32),
        "nonce": random.randbytes(12),
        "associated_data": random.randbytes(extra),
        "source": room(size, skews[0]),
        "destination": room(size, skews[1]),
        "tag": room(16, random.randrange(16)),
    }
    return Message(**parts | given)


def back(sealed: Message, **given: Any) -> Message:
    """Return what opens a sealed message, elsewhere."""
    parts: dict[str, Any] = {
        "key": sealed.key,
        "nonce": sealed.nonce,
        "associated_data": sealed.associated_data,
        "source": sealed.destination,
        "destination": room(sealed.source.numel(), sealed.source.data_ptr() % 16),
        "tag": sealed.tag,
    }
    return Message(**parts | given)


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def expected(one: Message) -> bytes:
    return ChaCha20Poly1305(one.key).encrypt(one.nonce, content(one.source), one.associated_data)


def sunscreen() -> Message:
    """Return what is to be sealed in RFC 8439, 2.8.2."""
    return message(
        114,
        0,
        key=bytes(range(0x80, 0xA0)),
        nonce=bytes.fromhex("070000004041424344454647"),
        associated_data=bytes.fromhex("50515253c0c1c2c3c4c5c6c7"),
        source=room(114, data=SUNSCREEN),
    )


def drafts() -> Message:
    """Return what is to be opened in RFC 8439, A.5."""
    size = len(DRAFTS_SEALED) - 16
    return message(
        size,
        0,
        key=bytes.fromhex("1c9240a5eb55d38af333888604f6b5f0473917c1402b80099dca5cbc207075c0"),
        nonce=bytes.fromhex("000000000102030405060708"),
        associated_data=bytes.fromhex("f33388860000000000004e91"),
        source=room(size, data=DRAFTS_SEALED[:-16]),
        tag=room(16, data=DRAFTS_SEALED[-16:]),
    )

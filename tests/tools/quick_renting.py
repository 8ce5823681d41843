"""Runs `glasshouse` with rentals that wait tenths of seconds where they would wait tens of them."""

from __future__ import annotations

from glasshouse.jobs import renting
from glasshouse.providers.rental.runpod import RunPod
from glasshouse.providers.rental.vast import Vast

renting.POLL_S, renting._PROOF_GAP_S, renting._WATCH_S = 0.3, 0.5, 1.0
RunPod.settles_s = Vast.settles_s = 3.0

if __name__ == "__main__":
    from glasshouse.cli import main

    main()

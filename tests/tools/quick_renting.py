"""Runs `glasshouse` with rentals that wait tenths of seconds where they would wait tens of them."""

from __future__ import annotations

from glasshouse.jobs.places import rent
from glasshouse.providers.rental.runpod import RunPod
from glasshouse.providers.rental.vast import Vast

rent.POLL_S, rent._PROOF_GAP_S, rent._WATCH_S = 0.3, 0.5, 1.0
RunPod.settles_s = Vast.settles_s = 3.0

if __name__ == "__main__":
    from glasshouse.cli import main

    main()

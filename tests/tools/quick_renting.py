"""Runs `glasshouse` with rentals that wait tenths of seconds where they would wait tens of them."""

from __future__ import annotations

from glasshouse.jobs.places import known_machines, rent, rental_watch
from glasshouse.providers.rental.runpod import RunPod
from glasshouse.providers.rental.vast import Vast

rent.POLL_S = rental_watch.POLL_S = known_machines.POLL_S = 0.3
rent._PROOF_GAP_S, rental_watch._WATCH_S = 0.5, 1.0
RunPod.settles_s = Vast.settles_s = 3.0

if __name__ == "__main__":
    from glasshouse.cli.app import main

    main()

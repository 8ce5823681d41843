"""`python -m glasshouse.cli`: the same as `glasshouse`."""

from glasshouse.cli.app import main

if __name__ == "__main__":
    main()

"""The entry point: signal handlers stand before anything else is imported."""

import sys


def main() -> None:
    from spill.signals import StopRequest

    stop = StopRequest()
    stop.install()
    from spill.cli import run

    sys.exit(run(stop))


if __name__ == "__main__":
    main()

"""Entry point of `potluck-relay`, also started by `python -m potluck.relay`."""

from potluck.common.process.entry import begin


def main() -> None:
    """Run `potluck-relay`."""
    begin("potluck.relay.cli")


if __name__ == "__main__":
    main()

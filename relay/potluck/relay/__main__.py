"""Entry point of `potluck-relay`; `python -m potluck.relay` is the same."""

from potluck.common.process.entry import begin


def main() -> None:
    """Run `potluck-relay`."""
    begin("potluck.relay.cli")


if __name__ == "__main__":
    main()

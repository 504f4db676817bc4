"""Entry point of `potluck-client`, also started by `python -m potluck.client`."""

from potluck.common.process.entry import begin


def main() -> None:
    """Run `potluck-client`."""
    begin("potluck.client.cli")


if __name__ == "__main__":
    main()

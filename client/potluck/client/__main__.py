"""Entry point of `potluck-client`; `python -m potluck.client` is the same."""

from potluck.common.process.entry import begin


def main() -> None:
    """Run `potluck-client`."""
    begin("potluck.client.cli")


if __name__ == "__main__":
    main()

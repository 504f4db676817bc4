"""Entry point of `potluck-server`; `python -m potluck.server` is the same."""

from potluck.common.process.entry import begin


def main() -> None:
    """Run the program."""
    begin("potluck.server.cli")


if __name__ == "__main__":
    main()

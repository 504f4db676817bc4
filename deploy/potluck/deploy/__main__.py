"""Entry point of the command `potluck`; `python -m potluck.deploy` runs the same command."""

from potluck.common.process.entry import begin


def main() -> None:
    """Run `potluck`."""
    begin("potluck.deploy.cli")


if __name__ == "__main__":
    main()

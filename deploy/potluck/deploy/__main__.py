"""Entry point of `potluck`; `python -m potluck.deploy` is the same."""

from potluck.common.process.entry import begin


def main() -> None:
    """Run `potluck`."""
    begin("potluck.deploy.cli")


if __name__ == "__main__":
    main()

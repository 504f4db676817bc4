"""Entry point of `potluck`; `python -m potluck.deploy` is the same."""

from potluck.common.process.entry import begin


def main() -> None:
    """Be the program."""
    begin("potluck.deploy.cli")


if __name__ == "__main__":
    main()

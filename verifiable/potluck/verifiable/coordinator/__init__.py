"""The coordinator's part: commits to inputs, collects shares of seeds, and replays selections."""

"""The tasks that come with Potluck."""

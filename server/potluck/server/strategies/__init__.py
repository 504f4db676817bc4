"""The strategies that come with Potluck, registered as `potluck.strategies` entry points."""

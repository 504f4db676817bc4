"""The strategies that are part of Potluck, registered as `potluck.strategies` entry points."""

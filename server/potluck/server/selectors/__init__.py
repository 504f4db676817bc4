"""The selectors that are part of Potluck: entry points of the group `potluck.selectors`."""

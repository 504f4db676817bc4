"""The selectors that come with Potluck. They are entry points of the group `potluck.selectors`."""

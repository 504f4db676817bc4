"""The objectives that come with Potluck; entry-point group `potluck.objectives`."""

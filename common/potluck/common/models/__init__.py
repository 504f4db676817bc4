"""The models that come with Potluck, registered in the entry-point group `potluck.models`."""

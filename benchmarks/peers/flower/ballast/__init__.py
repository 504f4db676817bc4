"""A Flower app that moves a model of a given size and trains nothing."""

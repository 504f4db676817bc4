"""Models of single clients: those that they keep, and those that are made to be measured."""

"""Models of single clients: models that clients keep, and models made only to be measured."""

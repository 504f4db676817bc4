"""A client's samples: their choice for a training, their cache on a GPU, and their counts."""

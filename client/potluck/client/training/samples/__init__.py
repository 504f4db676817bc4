"""A client's samples: which ones a training sees, where they lie, and what is counted of them."""

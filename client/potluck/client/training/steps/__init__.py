"""The steps of the loop that trains classification tasks, and the optimisers that take them."""

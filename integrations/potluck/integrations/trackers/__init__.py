"""The sinks that come with Potluck: files of tables, MLflow, TensorBoard, Weights & Biases.

Imports the seam `sink` only; libraries are imported by the methods that need them, since the
coordinator imports these modules and the sink's process calls them.
"""

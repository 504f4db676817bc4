"""The sinks that come with Potluck: files of tables, MLflow, TensorBoard, Weights & Biases.

Imports the extension point `sink` only. Libraries are imported in the methods that need them,
since the coordinator imports these modules but the sink's process calls the methods.
"""

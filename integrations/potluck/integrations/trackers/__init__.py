"""The sinks that come with Potluck: files of tables, MLflow, TensorBoard, Weights & Biases.

Imports the extension point `sink` only. Libraries are imported in the methods that need them: the
coordinator imports these modules, but only the sink's process calls the methods.
"""

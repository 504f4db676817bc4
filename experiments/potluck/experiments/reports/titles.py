"""Names of metrics in tables and plots."""

MEASURES = {
    "accuracy": "accuracy",
    "worst_group_accuracy": "worst group",
    "weighted_f1": "weighted F1",
    "loss": "loss",
    "worst_tenth": "worst tenth of clients",
}

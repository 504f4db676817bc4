"""A run in progress: its data, the owners of its changing state, its messages and its metrics.

Imports `eligibility`, `reduce` and what they import. The steps of a round (`select`, `updates`,
`run`) take the `Run` and change it. Watchers and Prometheus get what these modules publish.
"""

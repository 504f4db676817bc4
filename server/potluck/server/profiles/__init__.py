"""The profile phase of a run: what clients are asked to disclose, checked and kept.

Imports `hosts`, `aggregation` and the store. Signed profiles come in from hosts; the columns of a
`Population` come out.
"""

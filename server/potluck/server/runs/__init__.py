"""One run under way: it resumes, selects, trains, commits.

Imports every room but `service`. Starts where the store says the run is; ends in committed rounds,
announced to hosts and to those who watch.
"""

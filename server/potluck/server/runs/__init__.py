"""One run under way: it resumes, selects, trains, commits.

Imports every subpackage except `service`. Starts from the stored state of the run; ends in
committed rounds, announced to hosts and watchers.
"""

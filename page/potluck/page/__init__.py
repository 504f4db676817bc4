"""`potluck page`: runs, hosts and clients in the operator's browser.

A small local web server calls the coordinator with the operator's certificate. It sends JSON and
server-sent events to the page in `static/`. Pure modules (`*_shown`, `run_draft`) compute the
displayed values. `run_watch` follows each run once, however many pages are open. Imports `deploy`.
"""

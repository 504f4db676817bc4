"""`potluck page`: runs, hosts and clients in the operator's browser.

A small local web server asks the coordinator as any operator does and hands JSON and server-sent
events to the page in `static/`. What is shown is decided by pure modules (`*_shown`,
`run_comparison`, `run_draft`); `run_watch` follows each run once, however many pages are open.
Imports `deploy`.
"""

"""Verifiable selection: commitments before each selection, jointly made seeds, and audits.

The core does not import this package. It finds what it needs by name, in the entry-point group
`potluck.integrations`. `documents` defines the documents with the commitments. `chain` has the
rules that hosts and auditors check; it uses no network, clock or files.
"""

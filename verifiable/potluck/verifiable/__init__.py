"""Verifiable selection: commitments before each selection, a seed made together, and audits.

The core does not import this package. It finds what it needs by name, in the entry-point group
`potluck.integrations`. `documents` has what is committed to, `chain` the rules that hosts and
auditors check, without network, clock or files.
"""

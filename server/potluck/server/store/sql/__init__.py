"""SQL: the schema with every table and column, engines for SQLite and PostgreSQL, and their errors.

Imports `potluck.common` only. Takes a URL, returns connections.
"""

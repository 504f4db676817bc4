"""SQL: the schema with every table and column, engines for SQLite and PostgreSQL, failures.

Imports `potluck.common` only. A URL comes in; connections come out.
"""

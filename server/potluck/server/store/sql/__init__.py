"""SQL below the store's tables: engines for SQLite and PostgreSQL, types of columns, failures.

Imports `potluck.common` only. A URL comes in; connections come out.
"""

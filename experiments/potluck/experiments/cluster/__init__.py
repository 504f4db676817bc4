"""Cells on the machines of a Ray cluster: what they need, the data they read, who runs them there.

Imports `grid`. Cells go out to actors; reports of how they ended come back. Nothing else of Potluck
imports Ray.
"""

"""The benchmark of client selection: its tiers, rules, results and leaderboard.

Tiers are TOML files of the subfolder `tiers`; results are JSON files of the subfolder `published`.
Cells run as in every experiment. Imports grids and reports. Input: a tier and cells' results.
Output: results of arms and tables of them.
"""

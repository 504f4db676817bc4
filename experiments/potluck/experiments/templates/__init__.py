"""Packages of plug-ins to start from, written by `potluck new`.

Imports errors and plug-in names only. Input: a plug-in's name and a folder. Output: the files of an
installable package. The templates are the files of the subfolders; placeholders such as `$name` are
replaced.
"""

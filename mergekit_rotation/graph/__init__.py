"""Alignment inside mergekit's task graph; besides the command line, the only importer of mergekit.

`seams` holds every change that is made to mergekit, and nothing else makes any.
"""

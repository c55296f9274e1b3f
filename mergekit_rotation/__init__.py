"""mergekit-rotation: align transformers by their weight-space symmetries, then merge.

Importing this package does nothing and costs nothing; see `mergekit_rotation.startup` for how
mergekit finds it.
"""

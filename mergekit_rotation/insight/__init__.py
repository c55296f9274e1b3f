"""What alignment tells of models: the commands that compare and verify, and the reports of merges.

Each command is solved by the merge that would do it: a ``rotation_align`` is planned, and what it
solved is read off before anything is written.
"""

"""``python -m mergekit_rotation`` is ``mergekit-rotation``."""

from mergekit_rotation.cli import main

main(prog_name="mergekit-rotation")

"""What the planning of all layers shares: the planner, the checkpoints, warnings given."""

import logging
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from mergekit.io.tasks import LoadTensor
from mergekit.plan import MergePlanner

from mergekit_rotation.architecture import DeclarationError, Family, all_families, own_families
from mergekit_rotation.graph import parameters
from mergekit_rotation.graph.checkpoints import Checkpoint, read_config
from mergekit_rotation.graph.errors import RotationError

LOG = logging.getLogger(__name__)


def _own_families(given: Mapping[str, Any] | None) -> dict[Path, Family]:
    try:
        return own_families(parameters.architecture(given))
    except DeclarationError as problem:
        raise RotationError(str(problem)) from problem


def known_families(given: Mapping[str, Any] | None) -> tuple[Family, ...]:
    """Return the user's own families under the parameters of a merge, then ours.

    Raises
    ------
    RotationError
        If a user's own declaration of an architecture cannot be read.
    """
    return (*_own_families(given).values(), *all_families())


class Context:
    """Shared state of one planned merge.

    Parameters
    ----------
    planner : MergePlanner

    Raises
    ------
    RotationError
        If a user's own declaration of an architecture cannot be read.
    """

    def __init__(self, planner: MergePlanner):
        self.planner = planner
        self._own = _own_families(planner.config.parameters)
        self._families = (*self._own.values(), *all_families())
        self._checkpoints: dict[ModelReference, Checkpoint] = {}
        self._seen: set[Hashable] = set()

    def checkpoint(self, model: ModelReference) -> Checkpoint:
        """Return the (cached) checkpoint of a model."""
        if model not in self._checkpoints:
            config = read_config(model, self.planner.options.trust_remote_code)
            self._checkpoints[model] = checkpoint = Checkpoint(model, config, self._families)
            for file, family in self._own.items():
                if family is checkpoint.family:
                    self.warn_once(
                        f"{file}: your own declaration of {family.family} is used "
                        f"for {checkpoint.model_class}; check-architecture tells whether it holds"
                    )
        return self._checkpoints[model]

    def paths(self) -> list[str]:
        """Paths of all models that are read, the reference included."""
        return [model.model.path for model in self._checkpoints]

    def warn_once(self, message: str) -> None:
        """Show one warning, the first time only."""
        if self.first_time(message):
            LOG.warning(message)

    def first_time(self, thing: Hashable) -> bool:
        """Tell whether something comes up for the first time."""
        if thing in self._seen:
            return False
        self._seen.add(thing)
        return True

    def check_present(self, load: LoadTensor) -> None:
        """Refuse a required tensor that the model lacks.

        Raises
        ------
        RotationError
        """
        if not load.optional and not self.checkpoint(load.model).has(load):
            raise RotationError(
                f"{load.model}: tensor {load.tensor} is missing; the checkpoint is incomplete, "
                "fetch or save the model again"
            )

"""One model written in another's coordinates, and verified: ``rotation_align`` as a command."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergekit import merge as mergekit_merge
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_rotation.graph import alignment, run
from mergekit_rotation.graph.errors import (
    RotationError,
    in_one_sentence,
    is_out_of_memory,
    one_line,
)
from mergekit_rotation.graph.report import Report
from mergekit_rotation.graph.run import Run
from mergekit_rotation.insight.running import Unrun
from mergekit_rotation.insight.solved import checkpoint_of
from mergekit_rotation.insight.verify import Verified, verify

#: files that hold weights, or say which file does; mergekit writes its own
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
_INDEX = tuple(f"{ending}.index.json" for ending in _WEIGHTS)
#: what our messages say of a configuration -> how the command says it
_AS_OPTIONS = {
    ", and remove align_save and align_load": "",
    "set align_residual: ": "use --residual ",
    "set align_scale: true": "use --scale",
    "another align_reference": "another model for --to",
    "; remove the model": "; choose another model for --to",
    ", or set align_unsupported: skip to merge it unaligned": "",
    "(-vv shows": "(--verbose shows",
}


@dataclass(frozen=True)
class Aligned:
    """What was written, and whether it is the same function.

    Attributes
    ----------
    out : str
    alignment : mapping
        The content of ``alignment.json``.
    reports : sequence of Report
    run : Run
        What was recorded on the way.
    verified : Verified, optional
        None if that was not asked for, or cannot be told.
    problem : Exception, optional
        Why it cannot be told, or why what was written is no model.
    kept : bool
        Whether there is a model in ``out``.
    """

    out: str
    alignment: Mapping[str, Any]
    reports: Sequence[Report]
    run: Run = field(repr=False)
    verified: Verified | None = None
    problem: Exception | None = None
    kept: bool = True

    @property
    def reason(self) -> str:
        """Why it is not verified, in one line; empty if it is, or if that was not asked for."""
        if self.problem is not None:
            return one_line(self.problem)
        if self.verified is None or self.verified.same:
            return ""
        return self.verified.reason or f"they differ from {self.verified.apart} on"

    def data(self) -> dict[str, Any]:
        """Return what JSON has: ``alignment.json``, and three entries more."""
        return {
            **self.alignment,
            "out": self.out if self.kept else None,
            "verified": None if self.verified is None else self.verified.data(),
            "unverified": self.reason or None,
        }


def settings(
    model: str, reference: str, residual: str, scale: bool, architecture: str | None
) -> dict[str, Any]:
    """Return the configuration of the merge that writes a model in another's coordinates.

    Without a ``dtype:``, so that every tensor keeps its own.
    """
    given: dict[str, Any] = {"align_reference": reference, "align_residual": residual}
    if scale:
        given["align_scale"] = True
    if architecture is not None:
        given["align_architecture"] = architecture
    return {"merge_method": "rotation_align", "models": [{"model": model}], "parameters": given}


def align(
    model: str,
    reference: str,
    out: str,
    options: MergeOptions,
    *,
    residual: str = "none",
    scale: bool = False,
    architecture: str | None = None,
    verified: bool = True,
    text: Path | None = None,
) -> Aligned:
    """Write a model in the coordinates of another, and verify that it is the same function.

    Nothing that looks like a model stays in ``out`` if it is not.

    Parameters
    ----------
    model, reference : str
        As in a configuration of mergekit's.
    out : str
        Folder; a model that is there is replaced.
    options : MergeOptions
        With ``copy_tokenizer``, all files of a folder that are not weights are copied; of a model
        of the hub, those that mergekit copies.
    residual : {"none", "permutation", "orthogonal"}
    scale : bool
    architecture : str, optional
        See the parameters ``align_*``.
    verified : bool
        Whether to verify.
    text : Path, optional
        See `verify`.

    Raises
    ------
    RotationError
        If the model cannot be aligned or written.
    """
    LoaderCache().setup(options=options)
    _check(model, reference, out, options, verified)
    config = settings(model, reference, residual, scale, architecture)
    folder = Path(ModelReference.parse(model).model.path)
    ours = folder.is_dir()  # of the hub, no more is here than what mergekit copies
    given = {"copy_tokenizer": options.copy_tokenizer and not ours}
    try:
        mergekit_merge.run_merge(
            MergeConfiguration.model_validate(config), out, options.model_copy(update=given)
        )
    except RotationError as problem:
        raise RotationError(as_options(problem.message)) from problem
    this = run.current()
    if options.copy_tokenizer and ours:
        try:
            _copy_files(folder, Path(out), options.write_model_card)
        except BaseException as problem:
            this.remove_model()
            raise in_one_sentence(problem, out) or problem from problem
    found = Aligned(out, alignment.data(this), alignment.reports(this), this)
    return _verified(found, model, options, text) if verified else found


def as_options(text: str) -> str:
    """Return a message with the command's options in place of the parameters of a merge."""
    for said, meant in _AS_OPTIONS.items():
        text = text.replace(said, meant)
    return text


def _check(model: str, reference: str, out: str, options: MergeOptions, verified: bool) -> None:
    """Refuse at once what could only fail after hours.

    Raises
    ------
    RotationError
    """
    first, second = (checkpoint_of(name, options).model for name in (model, reference))
    paths = [first.model.path, second.model.path]
    run.refuse_inputs(out, paths)
    same_folder = all(map(os.path.exists, paths)) and os.path.samefile(*paths)
    if first == second or (same_folder and first.lora == second.lora):
        raise RotationError(f"{model} is the reference itself; name another model after --to")
    if verified and ModelReference.parse(out).model.path != out:
        raise RotationError(
            f"{out}: mergekit takes what follows + or @ for an adapter or a revision; choose "
            "another output folder"
        )


def _verified(found: Aligned, model: str, options: MergeOptions, text: Path | None) -> Aligned:
    """Run both models, and remove what was written if it is not the same function."""
    this, out = found.run, found.out
    cache = LoaderCache()
    cache.flush_all()
    cache.loaders.pop(ModelReference.parse(out), None)  # of an older model in the same folder
    verified, problem = None, None
    try:
        verified = verify(model, out, options, text=text)
    except Exception as trouble:
        problem = trouble
    kept = not _speaks_against(problem, out) if verified is None else verified.same
    if not kept:
        this.remove_model()
    return Aligned(out, found.alignment, found.reports, this, verified, problem, kept)


def _speaks_against(problem: Exception | None, out: str) -> bool:
    """Tell whether the original can be run and what was written cannot, though there is memory."""
    if not isinstance(problem, Unrun) or problem.model != out:
        return False
    return problem.__cause__ is None or not is_out_of_memory(problem.__cause__)


# -- the files besides the weights ----------------------------------------------------------------


def _copy_files(source: Path, out: Path, with_card: bool) -> None:
    """Copy tokenizer, code and whatever else is not weights, but nothing that the merge wrote."""
    written = ["config.json", alignment.FILE]
    if with_card:
        written += ["README.md", "mergekit_config.yml"]
    for file in list(_files(source, out.resolve())):
        name = file.relative_to(source)
        if str(name) not in written:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, out / name)


def _files(folder: Path, out: Path) -> Iterator[Path]:
    """Yield the files of a folder that hold no weights; hidden ones and the output are left out."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.resolve() == out:
            continue
        if path.is_dir():
            yield from _files(path, out)
        elif not path.name.endswith((*_WEIGHTS, *_INDEX)):
            yield path

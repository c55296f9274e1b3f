"""What holds of a declaration and what does not, for people to read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from mergekit_rotation.architecture import LAYER, Block, Family, LayoutError, grouped
from mergekit_rotation.proof.elements import (
    CONDITION,
    PARTS,
    element,
    layer_count,
    scaling,
    shifted,
)
from mergekit_rotation.proof.errors import ProofError
from mergekit_rotation.proof.models import (
    build,
    check_memory,
    example_configs,
    line,
    model_class,
    random_inputs,
    read_config,
    variants,
)
from mergekit_rotation.proof.subject import Subject
from mergekit_rotation.symmetry import moves

_WORDS = {
    "heads": "order of heads",
    "qk": "queries and keys",
    "vo": "values and output",
    "f": "neurons",
    "x": "experts",
    "permutation": "stream: permutation",
    "orthogonal": "stream: orthogonal",
}
#: of the maps that `align_scale` adds
_SCALED = {
    "qk": "scale: queries, keys",
    "vo": "scale: values, output",
    "f": "scale: neurons",
}


@dataclass(frozen=True)
class Row:
    """The largest change of the outputs under one kind of symmetry, and what rounding explains."""

    what: str
    change: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the outputs stay."""
        return self.change <= self.tolerance


@dataclass(frozen=True)
class Report:
    """What was found on one model.

    Attributes
    ----------
    title : str
        Model class, and which variant of it.
    rows : tuple of Row
    forgotten : int
        How many tensors were left out, one at a time.
    unseen : tuple of str
        Those of them that the outputs depend on, but that did not show.
    idle : tuple of str
        Those that the outputs do not depend on.
    unmentioned : tuple of str
        Tensors of the model that the file does not know.
    untouched : int
        How many tensors it does not know where it says nothing of the stream; this does not count.
    absent : tuple of str
        Tensors of the file that the model does not have.
    skipped : str
        Why there is no model to check, if there is none; this does not count.
    trouble : str
        Why a model could not be checked.
    """

    title: str
    rows: tuple[Row, ...] = ()
    forgotten: int = 0
    unseen: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    unmentioned: tuple[str, ...] = ()
    untouched: int = 0
    absent: tuple[str, ...] = ()
    skipped: str = ""
    trouble: str = ""

    @property
    def holds(self) -> bool:
        """Whether all that was checked holds."""
        faults = self.unseen or self.unmentioned or self.trouble
        return all(row.holds for row in self.rows) and not faults

    def lines(self) -> Iterator[str]:
        """Yield the report line by line."""
        if self.skipped:
            yield f"{self.title}: {self.skipped}; not checked"
            return
        if self.trouble:
            yield f"{self.title}: NOT PROVEN: {self.trouble}"
            return
        yield self.title
        yield f"  {'symmetry':22}{'largest change':>15}{'tolerance':>12}"
        for row in self.rows:
            verdict = "holds" if row.holds else "DOES NOT HOLD"
            yield f"  {row.what:22}{row.change:15.1e}{row.tolerance:12.1e}  {verdict}"
        if self.forgotten:
            shown = self.forgotten - len(self.unseen) - len(self.idle)
            yield f"  left out one at a time: {shown} of {self.forgotten} tensors show"
        if self.untouched:
            yield f"  without a word on the stream: {self.untouched} tensors stay as they are"
        for names, meaning in (
            (self.unseen, "part of the function, but NOT PROVEN: leaving it out does not show"),
            (self.idle, "no part of the function, so that nothing can show"),
            (self.unmentioned, "NOT MENTIONED in the file"),
            (self.absent, "not in this model, so not checked"),
        ):
            if names:
                yield f"  {meaning}:"
                yield from (f"    {name.replace(LAYER, '*')}" for name in names)


def check_family(family: Family, folder: Path | None = None) -> Iterator[Report]:
    """Check a family on small models of all its classes, or on one with a user's configuration.

    Parameters
    ----------
    family : Family
    folder : Path, optional
        With a ``config.json``; no weights are read.
    """
    if folder is not None:
        try:
            name, config = read_config(folder, family)
        except (ProofError, LayoutError) as problem:
            yield Report(family.family, trouble=str(problem))
            return
        yield from _check_class(family, name, {"": config})
        return
    for model_type, names in family.models.items():
        for name in names:
            try:
                model_class(name)
            except ProofError as problem:
                yield Report(name, skipped=str(problem))
                continue
            try:
                configs = example_configs(family, model_type)
            except ProofError as problem:
                yield Report(name, trouble=str(problem))
                continue
            yield from _check_class(family, name, configs)


def _check_class(
    family: Family, name: str, configs: Mapping[str, PretrainedConfig]
) -> Iterator[Report]:
    for alternative, config in configs.items():
        for variant, one in variants(config, family).items():
            which = ", ".join(text for text in (alternative, variant) if text)
            title = f"{name} ({which})" if which else name
            try:
                check_memory(name, one)
                yield _check(_subject(build(name, one), family), title)
            except (ProofError, LayoutError) as problem:
                yield Report(title, trouble=str(problem))


def _subject(model: PreTrainedModel, family: Family) -> Subject:
    try:
        return Subject(model, random_inputs(model), family)
    except (ProofError, LayoutError):
        raise
    except Exception as problem:
        raise ProofError(f"it does not run on random inputs ({line(problem)})") from problem


def _check(subject: Subject, title: str) -> Report:
    """Apply all that is declared to one model, then leave out every tensor in turn."""
    blocks = list(_block_rows(subject))
    stream = [] if subject.headless else list(_stream_rows(subject))
    forgotten = [
        *(_forgotten_legs(subject).items() if all(row.holds for row in blocks) else ()),
        *(_forgotten_stream(subject) if stream and all(row.holds for row in stream) else ()),
    ]
    invisible = [template for template, shows in forgotten if not shows]
    idle = [template for template in invisible if not _matters(subject, template)]
    known = {**subject.family.block_tensors(), **subject.family.stream.tensors}
    templates = [*(name.removesuffix("?") for name in known), *subject.family.stream.norms]
    unknown = [name for name in subject.state if name not in subject.declared]
    silent = not (subject.family.stream.maps or subject.family.stream.tensors)
    return Report(
        title,
        rows=(*blocks, *stream),
        forgotten=len(forgotten),
        unseen=tuple(t for t in dict.fromkeys(invisible) if t not in idle),
        idle=tuple(dict.fromkeys(idle)),
        unmentioned=() if silent else tuple(grouped(unknown)),
        untouched=len(unknown) if silent else 0,
        absent=tuple(t for t in templates if not _names(subject, t)),
    )


def _block_rows(subject: Subject) -> Iterator[Row]:
    for parts in (*((part,) for part in PARTS), PARTS):
        state = subject.moved(partial(element, parts=parts))
        if any(not torch.equal(x, subject.state[name]) for name, x in state.items()):
            what = _WORDS[parts[0]] if len(parts) == 1 else "all of these"
            yield Row(what, subject.difference(state), subject.tolerance())
    for part, what in _SCALED.items():
        if any(scaling(block, index, (part,)) for block, index in _present(subject)):
            state = subject.moved(partial(scaling, parts=(part,)))
            yield Row(what, subject.difference(state), subject.tolerance(CONDITION))
    state = shifted(subject.state, subject.config, subject.family, 0)
    if any(not torch.equal(x, subject.state[name]) for name, x in state.items()):
        yield Row("free biases", subject.difference(state), subject.tolerance(CONDITION))


def _stream_rows(subject: Subject) -> Iterator[Row]:
    for kind in subject.exact_maps():
        stream = subject.draw(kind)
        states = (subject.moved_stream(stream, fold=fold) for fold in (True, False))
        change = max(subject.difference(state) for state in states)
        yield Row(_WORDS[kind], change, subject.stream_tolerance())


def _forgotten_legs(subject: Subject) -> dict[str, bool]:
    """Map templates of the tensors of all blocks to whether their omission shows, always."""
    shows: dict[str, bool] = {}
    for draw, condition in ((element, 1.0), (scaling, CONDITION)):
        templates = {
            template: None
            for block, index in _present(subject)
            for template, (_, pattern) in subject.legs(block, index).items()
            if draw is element or moves(draw(block, index), pattern)
        }
        for template in templates:
            change = subject.difference(subject.moved(draw, forget=template))
            shows[template] = shows.get(template, True) and change > subject.tolerance(condition)
    return shows


def _present(subject: Subject) -> Iterator[tuple[Block, int]]:
    """Yield every block of every layer, and which layer it is."""
    for index in range(layer_count(subject.config)):
        for block in subject.blocks(index):
            yield block, index


def _forgotten_stream(subject: Subject) -> Iterator[tuple[str, bool]]:
    """Yield template and whether its omission shows, for the tensors of the stream."""
    stream = subject.draw(subject.exact_maps()[-1])
    for template in subject.stream.layout.patterns:
        tied = subject.tied and template in subject.stream.tied
        if _names(subject, template) and not tied:
            change = subject.difference(subject.moved_stream(stream, forget=template))
            yield template, change > subject.stream_tolerance()


def _matters(subject: Subject, template: str) -> bool:
    """Tell whether the outputs depend on a tensor: whether they change when it is drawn anew."""
    generator = torch.Generator().manual_seed(0)
    state = dict(subject.state)
    for name in _names(subject, template):
        noise = torch.randn(state[name].shape, generator=generator, dtype=torch.float64)
        state[name] = noise * state[name].std()
    return subject.difference(state) > subject.tolerance()


def _names(subject: Subject, template: str) -> list[str]:
    """Return the names of a template in all layers that have it."""
    layers = range(layer_count(subject.config) if LAYER in template else 1)
    return [name for index in layers if (name := subject.name(template, index))]

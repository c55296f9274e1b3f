"""A merge that is killed, interrupted or out of disk space leaves nothing that passes for a model.

Every such merge runs in a fork of this process, in which everything is imported, and meets its
fate at one of the moments at which it changes the output folder: before it opens, renames or
removes a file there, and again when some bytes of what it opened are written. How many moments
there are is not known beforehand: the fate moves on from one to the next until a merge meets none.
"""

import errno
import os
import shutil
import signal
import sys
import warnings

import pytest
import torch
from mergekit.io.tensor_writer import TensorWriter

import tiny
from merging import Twins, config, merge, merged, save_tokenizer, stored

resource = pytest.importorskip("resource")

WHOLE = ("--copy-tokenizer", "--write-model-card")
SHARDS = ("--out-shard-size", "40K")
SOME_BYTES = 100
"""All that can still be written of a file once its writing is to fail; every file is longer."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    twins = Twins("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    for folder in (twins.reference, *twins.others):
        save_tokenizer(folder, [f"t{i}" for i in range(tiny.VOCABULARY)])
    return [twins.reference, *twins.others]


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """Folders that hold an older model in one of mergekit's formats."""
    folder = tmp_path_factory.mktemp("older")
    tiny.save(tiny.build("llama", seed=7), folder / "model")
    stored(folder / "model", folder / "shards", pickled=False, sharded=True)
    stored(folder / "model", folder / "pickles", pickled=True, sharded=True)
    stored(folder / "model", folder / "pickle", pickled=True, sharded=False)
    return folder


# -- fates: what happens before a change of the folder, or while a file is written ----------------


def killed(writing):
    if not writing:
        os.kill(os.getpid(), signal.SIGKILL)
    _limit_files()


def terminated(writing):
    if not writing:
        os.kill(os.getpid(), signal.SIGTERM)
    killed(writing)


def interrupted(writing):
    """Do what Ctrl-C does; Python notices it only when a write is over."""
    signal.raise_signal(signal.SIGINT)


def out_of_space(writing):
    """Refuse a new file, or more than its first bytes, as a full disk does."""
    if not writing:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _limit_files()


def _limit_files():
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (SOME_BYTES, hard))


# -- merges that meet them ------------------------------------------------------------------------


def watch(out, number, fate):
    """Let this process meet its fate at one of the moments at which a folder changes.

    Returns a function that tells whether it did.
    """
    seen = 0

    def moment(opens):
        nonlocal seen
        for writing in (False, True)[: 1 + (opens and fate is not interrupted)]:
            seen += 1
            if seen == number:
                fate(writing)

    def hook(event, arguments):
        if event in ("os.remove", "os.rename", "open") and str(arguments[0]).startswith(str(out)):
            if event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR):
                moment(event == "open")

    def write_shard(*args, **kwargs):  # what writes tensors is not written in Python
        moment(True)
        return original(*args, **kwargs)

    original = TensorWriter._write_shard_task
    TensorWriter._write_shard_task = write_shard
    sys.addaudithook(hook)
    return lambda: seen >= number


def merge_in_a_fork(raw, out, options, number, fate):
    """Merge, and return how the process ended: minus a signal, or whether it met its fate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of torch are not forked
        process = os.fork()
    if process == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if fate in (killed, terminated):  # by the kernel, as soon as a file is too long
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            torch.set_num_threads(1)
            met = watch(out, number, fate)
            merge(raw, out, *options)
        finally:
            os._exit(met())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def ends(raw, out, before, options, fate):
    """Yield how a merge ended, for every moment at which it may meet its fate, and what it left."""
    for number in range(1, 1000):
        shutil.rmtree(out, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, out)
        status = merge_in_a_fork(raw, out, options, number, fate)
        if status == 0:
            return
        yield status, files(out)


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()} if folder.exists() else {}


def weights(found):
    """Return what holds weights, or says where they are."""
    return {name: x for name, x in found.items() if ".safetensors" in name or ".bin" in name}


def undisturbed(raw, out, before, options):
    out.parent.mkdir()
    if before.exists():
        shutil.copytree(before, out)
    return files(merged(raw, out, *options))


ASYNC_SHARDS, PICKLED_SHARDS = ("--async-write", *SHARDS), ("--no-safe-serialization", *SHARDS)
KILLS = [
    (killed, "none", SHARDS),
    (killed, "model", ()),
    (killed, "shards", ASYNC_SHARDS),
    (killed, "pickle", ("--async-write",)),
    (killed, "pickles", PICKLED_SHARDS),
    (terminated, "model", ()),
]


@pytest.mark.parametrize(("fate", "before", "options"), KILLS)
def test_a_merge_may_be_killed_at_any_moment(fate, before, options, models, older, tmp_path, tally):
    """Without all weights there is no config.json, and the next run is as if it were the first."""
    raw, options = config("rotation_linear", models), (*WHOLE, *options)
    before, out = older / before, tmp_path / "out"
    expected = undisturbed(raw, tmp_path / "undisturbed" / "out", before, options)
    survived = []
    for status, found in ends(raw, out, before, options, fate):
        assert status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGXFSZ)
        complete = weights(found) == weights(expected)
        harmless = complete or "config.json" not in found or found == files(before)
        survived.append(harmless and files(merged(raw, out, *options)) == expected)
    tally("kills survived", survived)
    assert len(survived) > 10 and all(survived)


FAILURES = [
    (interrupted, "none", SHARDS),
    (interrupted, "shards", ASYNC_SHARDS),
    (out_of_space, "none", ASYNC_SHARDS),
    (out_of_space, "shards", SHARDS),
    (out_of_space, "pickles", PICKLED_SHARDS),
]


@pytest.mark.parametrize(("fate", "before", "options"), FAILURES)
def test_a_merge_that_fails_leaves_no_part_of_a_model(
    fate, before, options, models, older, tmp_path, tally
):
    """The folder is as it was, or without configuration and weights, or the model is complete."""
    raw, options = config("rotation_linear", models), (*WHOLE, *options)
    before, out = older / before, tmp_path / "out"
    expected = undisturbed(raw, tmp_path / "undisturbed" / "out", before, options)
    survived = []
    for status, found in ends(raw, out, before, options, fate):
        assert status == 1
        complete = found.get("config.json") == expected["config.json"]
        if complete:
            survived.append(weights(found) == weights(expected))
        else:
            nothing = not weights(found) and "config.json" not in found
            survived.append(nothing or found == files(before))
    tally("failures survived", survived)
    assert len(survived) > 10 and all(survived)

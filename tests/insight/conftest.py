"""What all tests of commands need."""

import logging

import pytest


@pytest.fixture(autouse=True)
def log_levels():
    """The command sets them for its process, which here is that of other tests, too."""
    loggers = [logging.getLogger(name) for name in ("mergekit", "mergekit_rotation")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)

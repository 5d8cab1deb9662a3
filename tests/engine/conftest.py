"""Tiny models, made once a session, and one torch thread for those who want it."""

from __future__ import annotations

import random

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Return a function from family to a folder with a tiny model of it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvist.testing.models import tiny_model

    root = tmp_path_factory.mktemp("tiny")
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tiny_model(family, root / family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def one_thread():
    """Run torch on one thread: on tensors this small more threads only wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng(request):
    """Return a random generator that is the same in every run of the same test."""
    return random.Random(request.node.name)


@pytest.fixture(scope="session")
def smollm2_folder():
    """Return the folder of the default model, pulled if need be; skip where it cannot be had."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvist.engine.weights.progress import silent
    from kvist.engine.weights.source import resolve
    from kvist.errors import DownloadError

    try:
        return resolve("smollm2-135m-instruct", silent).path
    except DownloadError as error:
        pytest.skip(f"smollm2-135m-instruct cannot be fetched here: {error}")

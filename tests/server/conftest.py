"""An engine's process without a model, for the tests of what stands in front of it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

NULL_WORKER = (sys.executable, str(Path(__file__).with_name("null_worker.py")))


@pytest.fixture
def null_client():
    """Return a context manager: an `EngineClient` in front of a null engine, started and ready."""
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    from kvist.config import EngineConfig
    from kvist.server.bridge import EngineClient

    @asynccontextmanager
    async def opened():
        client = EngineClient(EngineConfig(model="null"), NULL_WORKER)
        try:
            await client.start()
            await client.wait_ready()
            yield client
        finally:
            await client.stop()

    return opened


@pytest.fixture
def comes_true():
    """Return a function that waits until a condition (a coroutine function) holds."""

    async def wait(condition, timeout_s=30):
        async with asyncio.timeout(timeout_s):
            while not await condition():
                await asyncio.sleep(0.01)

    return wait

"""`kvist serve`, with the null engine's process in place of the model's: the same, only quick."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from kvist.cli import app
from kvist.server import serve
from kvist.server.bridge import EngineClient

serve.EngineClient = functools.partial(
    EngineClient, command=(sys.executable, str(Path(__file__).with_name("null_worker.py")))
)
app()

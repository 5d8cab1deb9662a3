"""The control plane runs where torch is not installed, and loads none where it is.

Guards: one import too many at the top of a file makes `kvist plan` take seconds, and the books
untestable without torch. import-linter sees imports that are written down; this sees what happens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROBE = """
import importlib, json, sys
modules, heavy = json.loads(sys.argv[1])
found = {}
for name in modules:
    importlib.import_module(name)
    loaded = [package for package in heavy if package in sys.modules]
    if loaded:
        found[name] = loaded
        break
print(json.dumps(found))
"""


def test_importing_the_control_plane_loads_no_tensor_library():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = next(
        contract
        for contract in pyproject["tool"]["importlinter"]["contracts"]
        if contract["name"] == "the control plane knows no tensors"
    )
    modules = ["kvist", "kvist.cli", *contract["source_modules"]]
    assert len(modules) > 10

    probe = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([modules, contract["forbidden_modules"]])],
        capture_output=True,
        text=True,
        check=False,
    )

    assert probe.returncode == 0, probe.stderr
    assert json.loads(probe.stdout) == {}

"""The examples do what they teach: held to the plain definition and to the planner."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvist.lab.known_models import KNOWN_MODELS
from kvist.spec import KVSpec

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_runs(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_formula_is_the_planners():
    kv_cache_bytes = load("kv_cache_size").kv_cache_bytes
    for name in ("llama-2-7b", "llama-3.1-8b", "qwen3-8b"):
        spec = KVSpec.from_config(KNOWN_MODELS[name].config)
        (group,) = spec.groups
        assert kv_cache_bytes(
            spec.num_layers, group.num_kv_heads, group.key_dim, 1000, spec.itemsize
        ) == spec.kv_bytes(1000)
    with pytest.raises(ValueError, match="head_dim"):
        kv_cache_bytes(1, 1, 0, 1, 2)


def test_the_simple_cache_returns_all_tokens_in_order():
    cache = load("simple_kv_cache").SimpleKVCache(3, 10, 4, torch.float32)
    tokens = torch.randn(10, 3, 4)
    done = 0
    for step in (4, 1, 5):
        for layer in range(3):
            new = tokens[done : done + step, layer]
            keys, values = cache.update(layer, new, -new)
            assert torch.equal(keys, tokens[: done + step, layer])
            assert torch.equal(values, -tokens[: done + step, layer])
        cache.advance(step)
        done += step
    with pytest.raises(ValueError, match="do not fit"):
        cache.update(0, tokens[:1, 0], tokens[:1, 0])
    with pytest.raises(ValueError, match="advance"):
        cache.advance(1)


def test_the_paged_cache_reads_back_what_was_written_wherever_it_lies():
    cache = load("paged_kv_cache").PagedKVCache(2, 8, 4, 3)
    written: dict[str, list] = {"a": [], "b": []}
    for name, step in (("a", 3), ("b", 6), ("a", 4), ("b", 1), ("a", 6)):
        assert cache.allocate(name, step)
        new = torch.randn(step, 2, 3)
        written[name].append(new)
        for layer in range(2):
            cache.write(name, layer, new[:, layer], -new[:, layer])
        cache.advance(name, step)
    for name, parts in written.items():
        for layer in range(2):
            keys, values = cache.read(name, layer)
            assert torch.equal(keys, torch.cat(parts)[:, layer])
            assert torch.equal(values, -torch.cat(parts)[:, layer])
    held = {block for table in cache.tables.values() for block in table}
    assert len(held) + cache.num_free_blocks == 8
    before = {name: list(table) for name, table in cache.tables.items()}
    assert not cache.allocate("c", 100)
    assert cache.tables == before
    cache.free("a")
    cache.free("b")
    assert cache.num_free_blocks == 8

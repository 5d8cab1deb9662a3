"""Streaming text equals decoding all of it, for every kind of decoder; chats get one BOS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.engine.detokenizer import DecoderKind, TokenBytes
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import ModelError, RequestError

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{{ '<s>' }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _save(backend, folder: Path, **kwargs) -> Tokenizer:
    inner = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **kwargs
    )
    inner.save_pretrained(folder)
    return Tokenizer(folder)


def _byte_level(folder: Path) -> Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "he"), ("Ã", "©")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    # One added token in the byte alphabet's letters, one beyond it: the decoder spells them apart.
    backend.add_tokens(["<think>", "né", "日本"])
    return _save(backend, folder, bos_token="<s>", eos_token="</s>", chat_template=CHATML)


def _byte_fallback(folder: Path) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "h", "e", "▁he", "▁▁", "�", "é", "日"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(
        vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("▁"),
            tokenizers.normalizers.Replace(" ", "▁"),
        ]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return _save(backend, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _word_piece(folder: Path) -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "a", "b", "##a", "##b", "don", "'", "t", ".", "##."]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[CLS]"])
    return _save(backend, folder, unk_token="[UNK]", cls_token="[CLS]")


MAKERS = {
    DecoderKind.BYTE_LEVEL: _byte_level,
    DecoderKind.BYTE_FALLBACK: _byte_fallback,
    DecoderKind.OTHER: _word_piece,
}


@pytest.fixture(scope="module", params=MAKERS, ids=lambda kind: kind.name.lower())
def made(request, tmp_path_factory):
    maker: Callable[[Path], Tokenizer] = MAKERS[request.param]
    tokenizer = maker(tmp_path_factory.mktemp("tokenizer"))
    assert tokenizer._tokens.kind is request.param
    return tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return _byte_level(tmp_path_factory.mktemp("tokenizer"))


def _stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip)
    return [*(stream.push(index) for index in ids), stream.flush()]


@settings(max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_deltas_join_to_the_full_decoding_of_any_ids(made, data, skip):
    # Two ids beyond the vocabulary: a model padded past its tokenizer can sample them.
    ids = data.draw(st.lists(st.integers(0, made.vocab_size + 1), max_size=40))
    expected = made._inner.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert made.decode(ids, skip) == expected
    assert "".join(_stream(made, ids, skip)) == expected


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd")))
def test_text_streams_without_broken_characters(byte_level, text):
    deltas = _stream(byte_level, byte_level.encode(text, add_special_tokens=False), skip=False)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_half_a_character_is_held_until_it_is_whole(byte_level):
    ids = byte_level.encode("a€b", add_special_tokens=False)
    stream = byte_level.stream()
    assert [stream.push(index) for index in ids] == ["a", "", "", "€", "b"]


def test_a_stream_cut_in_a_character_ends_as_the_whole_decodes(byte_level):
    ids = byte_level.encode("a€", add_special_tokens=False)[:-1]
    assert _stream(byte_level, ids) == ["a", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_appears_when_it_ends(tmp_path):
    tokenizer = _byte_fallback(tmp_path)
    ids = tokenizer.encode("a€b", add_special_tokens=False)
    deltas = _stream(tokenizer, ids)
    assert "".join(deltas) == "a€b"
    assert deltas[-2] == "€b"  # with the token that ends the run


class _Counting(TokenBytes):
    __slots__ = ("decoded",)

    def decode(self, token_ids):
        self.decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize(("kind", "ids_a_token"), [("byte_level", 0), ("word_piece", 3)])
def test_the_cost_of_a_token_does_not_grow_with_the_text(tmp_path, kind, ids_a_token):
    # Guards against decoding the whole text for every token: quadratic, and invisible in tests
    # of short texts.
    tokenizer = {"byte_level": _byte_level, "word_piece": _word_piece}[kind](tmp_path)
    counting = _Counting(tokenizer._inner)
    counting.decoded = 0
    tokenizer._tokens = counting
    _stream(tokenizer, [2, 3, 4] * 500)
    assert counting.decoded <= ids_a_token * 1500


def test_special_tokens_are_left_out_or_spelled(byte_level):
    end = byte_level.encode("</s>", add_special_tokens=False)
    ids = [*byte_level.encode("he", add_special_tokens=False), *end]
    assert len(end) == 1
    assert "".join(_stream(byte_level, ids)) == "he"
    assert "".join(_stream(byte_level, ids, skip=False)) == "he</s>"


def test_a_chat_has_one_bos_whoever_writes_it(byte_level):
    messages = [{"role": "user", "content": "he"}]
    ids = byte_level.encode_chat(messages)
    assert ids[0] == byte_level.bos_token_id
    assert ids.count(byte_level.bos_token_id) == 1
    assert byte_level.decode(ids) == "user: he\nassistant:"
    twice = byte_level.encode_chat(messages, chat_template="<s>" + CHATML)
    assert twice == ids


def test_the_generation_prompt_and_the_template_can_be_chosen(byte_level):
    messages = [{"role": "user", "content": "he"}]
    assert byte_level.render_chat(messages, add_generation_prompt=False).endswith("he\n")
    template = "{{ tools[0]['name'] }}|{{ mode }}"
    tools = [{"name": "f"}]
    assert byte_level.render_chat(messages, tools, True, template, {"mode": "x"}) == "f|x"


def test_a_chat_without_a_template_says_what_to_do(tmp_path):
    with pytest.raises(RequestError, match=r"no chat template.*plain prompt") as caught:
        _byte_fallback(tmp_path).encode_chat([{"role": "user", "content": "a"}])
    assert caught.value.param == "messages"


def test_a_template_that_refuses_is_the_requests_fault(byte_level):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        byte_level.render_chat([{"role": "user", "content": "a"}], chat_template=template)
    with pytest.raises(RequestError, match="empty"):
        byte_level.render_chat([])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ["</s>"]),
        ({"config.json": {"eos_token_id": 7}}, [7, "</s>"]),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {}}, [7, "</s>"]),
        (
            {
                "config.json": {"eos_token_id": 7},
                "generation_config.json": {"eos_token_id": [9, 8]},
            },
            [9, 8, "</s>"],
        ),
    ],
)
def test_every_id_that_ends_a_generation_is_known(tmp_path, files, expected):
    first = _byte_level(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    end = first.encode("</s>", add_special_tokens=False)[0]
    assert list(Tokenizer(tmp_path).eos_token_ids) == [end if e == "</s>" else e for e in expected]


@pytest.mark.parametrize("wrong", ["</s>", [7, "a"], [[7]], 1.5])
def test_an_end_that_is_no_id_is_a_model_error(tmp_path, wrong):
    _byte_level(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["null", "5", "[]", "[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_a_model_error(tmp_path, name, content):
    _byte_level(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match="cannot build the tokenizer"):
        Tokenizer(tmp_path)


def test_half_a_surrogate_pair_is_the_requests_fault(byte_level):
    """Guarded: the library below says TypeError, and that would be ours."""
    with pytest.raises(RequestError, match=r"U\+D800\) stands at letter 1"):
        byte_level.encode("a\ud800")


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_importing_the_tokenizer_imports_no_torch():
    code = (
        "import sys, kvist.engine.tokenizer; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"

"""Which kernel runs and why; and the batch that all of them are given.

Guards: a choice that nobody can read in the log, a backend chosen where it cannot run, and a batch
whose numbers do not fit together reaching a kernel that trusts them.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvist.errors import BackendError, ConfigError
from kvist.kernels import cpu, dispatch
from kvist.kernels.batch import PIECE_TOKENS, AttentionBatch
from kvist.spec import BlockLayout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_CPP = cpu.obstacle(CPU)


def layout(**changes):
    numbers = {"num_layers": 2, "num_kv_heads": 3, "key_dim": 64, "value_dim": 64}
    return BlockLayout(**{**numbers, "block_size": 16, "itemsize": 2, **changes})


def select(device=CPU, dtype=torch.bfloat16, prefer=None, **changes):
    return dispatch.select(device, dtype, layout(**changes), 9, prefer)


def backends(kernels):
    return {operation: backend for operation, backend, _ in kernels.report}


@pytest.fixture
def unbuilt(monkeypatch):
    monkeypatch.setattr(cpu, "_C", None)
    monkeypatch.setattr(cpu, "_REASON", "No module named 'kvist._C'")


@pytest.mark.skipif(NO_CPP is not None, reason=str(NO_CPP))
def test_the_extension_serves_where_it_is_built():
    kernels = select()
    assert backends(kernels) == dict.fromkeys(dispatch.OPERATIONS, "cpp")
    assert "thread" in kernels.describe()


@pytest.mark.usefixtures("unbuilt")
def test_without_the_extension_torch_serves_and_the_log_says_why():
    kernels = select()
    assert set(backends(kernels).values()) == {"torch"}
    assert "decode: torch (because kvist._C is not built: No module named" in kernels.describe()
    assert "decode: torch (asked for)" in select(prefer="torch").describe()


@pytest.mark.usefixtures("unbuilt")
def test_asking_for_what_is_not_built_is_refused_with_the_reason():
    with pytest.raises(BackendError, match=r"kvist\._C is not built: No module named"):
        select(prefer="cpp")


def test_a_gpu_is_served_by_torch():
    kernels = select(device=CUDA)
    assert set(backends(kernels).values()) == {"torch"}
    assert "the pool is on cuda" in kernels.describe()
    with pytest.raises(BackendError, match="the pool is on cuda"):
        select(device=CUDA, prefer="cpp")


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_is_asked_for_is_what_runs(backend):
    kernels = select(prefer=backend)
    assert set(backends(kernels).values()) == {backend}
    assert [operation for operation, _, _ in kernels.report] == list(dispatch.OPERATIONS)


def test_an_unknown_backend_names_those_that_exist():
    with pytest.raises(ConfigError, match=r"'cuda'.*cpp, torch, sdpa, reference"):
        select(prefer="cuda")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"value_dim": 0}, "latent"),
        ({"dtype": torch.float32}, "4 bytes an element, the layout says 2"),
        ({"dtype": torch.int16}, "torch.int16"),
        ({"num_kv_heads": 2}, "9 query heads cannot share 2"),
    ],
)
def test_pools_that_no_kernel_reads_are_refused(arguments, says):
    with pytest.raises(BackendError, match=says):
        select(**arguments)


def build(query_lens, context_lens, tables=None, block_size=16):
    if tables is None:
        tables = [range(-(-context // block_size)) for context in context_lens]
    return AttentionBatch.build(query_lens, context_lens, tables, block_size)


def test_a_batch_lays_its_numbers_out():
    batch = build([1, 1, 5, 1], [40, 7, 5, 20], [[4, 5, 6], [7], [8], [9, 2]])
    assert batch.query_start.tolist() == list(batch.query_start_list) == [0, 1, 2, 7, 8]
    assert batch.seq_lens.tolist() == [40, 7, 5, 20]
    assert [batch.block_tables[r].tolist()[:2] for r in (0, 3)] == [[4, 5], [9, 2]]
    assert batch.num_tokens == 8
    # Only the leading run: a one-token sequence behind a prompt is a prefill of one token.
    assert batch.num_decodes == 2
    assert {t.dtype for t in (batch.query_start, batch.seq_lens, batch.block_tables)} == {
        torch.int32
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1, 1], [5]), "2 query lengths came with 1 context"),
        (([0], [5]), "0 query tokens in a context of 5"),
        (([6], [5]), "6 query tokens in a context of 5"),
        (([1], [33], [[1, 2]]), r"context of 33 tokens but a table of 2 blocks .* 3 blocks"),
        (([1], [33], torch.zeros(1, 2, dtype=torch.int32)), "a table of 2 blocks"),
        (([1], [5], [[1]], 0), "block_size is 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        build(*arguments)


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 512, 1000])
def test_pieces_cover_each_context_once(block_size):
    contexts = [1, block_size, 511, 512, 513, 3000]
    tables = [[1000 * r + b for b in range(-(-c // block_size))] for r, c in enumerate(contexts)]
    batch = build([1] * 6, contexts, tables, block_size)
    seen = {}
    for group in batch.pieces():
        columns = zip(group.sequence, group.rank, group.blocks, group.tokens, strict=True)
        for sequence, rank, blocks, tokens in columns:
            used = blocks.tolist()[: -(-int(tokens) // block_size)]
            assert set(blocks.tolist()[len(used) :]) <= {0}
            seen[int(sequence), int(rank)] = (used, int(tokens))
    for sequence, context in enumerate(contexts):
        parts = [seen[key] for key in sorted(seen) if key[0] == sequence]
        assert [block for used, _ in parts for block in used] == tables[sequence]
        assert sum(tokens for _, tokens in parts) == context


@pytest.mark.parametrize("window", [1, 100, 512, 513, 5000])
def test_pieces_under_a_window_show_it_and_no_more(window):
    contexts = [1, 511, 513, 3000]
    batch = build([1] * 4, contexts)
    shown = dict.fromkeys(range(4), 0)
    for group in batch.pieces(window):
        for sequence, tokens, begin in zip(group.sequence, group.tokens, group.begin, strict=True):
            assert 0 <= begin < tokens
            shown[int(sequence)] += int(tokens - begin)
    assert list(shown.values()) == [min(context, window) for context in contexts]


def test_the_width_of_a_piece_is_its_own():
    widths = set()
    for others in ([], [1], [PIECE_TOKENS], [40, 3000]):
        batch = build([1] * (1 + len(others)), [40, *others])
        widths |= {g.blocks.shape[1] for g in batch.pieces() if 0 in g.sequence.tolist()}
    assert len(widths) == 1

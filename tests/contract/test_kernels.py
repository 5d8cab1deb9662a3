"""Every kernel backend passes the shipped contract; the reference passes a dense one.

Guards: a backend that disagrees with the meaning of paged attention, and a reference that all
backends agree with but that means something else.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention

from kvist.kernels import cpu, dispatch
from kvist.kernels.batch import AttentionBatch
from kvist.testing.kernel_cases import CASES, HOLES, LAYER, KernelCase, Scene
from kvist.testing.kernels import KernelContract, same_bytes

CPU = torch.device("cpu")
NO_CPP = cpu.obstacle(CPU)


def chosen(case, backend):
    return dispatch.select(CPU, case.dtype, case.layout, case.num_query_heads, backend)


class TestReference(KernelContract):
    bitwise = False  # torch's matrix product may round by the shape of its operands

    def select(self, case):
        return chosen(case, "reference")


class TestTorch(KernelContract):
    bitwise = False

    def select(self, case):
        return chosen(case, "torch")


class TestSdpa(KernelContract):
    bitwise = False

    def select(self, case):
        return chosen(case, "sdpa")


class CppContract(KernelContract):
    """One instruction set; what it does not have of its own, the set before it does."""

    isa = ""

    @pytest.fixture(autouse=True)
    def _only_this_isa(self, monkeypatch):
        if NO_CPP is not None or self.isa not in cpu.available_isas():
            pytest.skip(NO_CPP or f"this processor has no {self.isa}")
        monkeypatch.setenv(cpu.ISA_VARIABLE, self.isa)

    def select(self, case):
        return chosen(case, "cpp")


class TestPortable(CppContract):
    isa = "portable"


class TestAvx2(CppContract):
    isa = "avx2"


class TestAvx512(CppContract):
    isa = "avx512"


class TestAvx512Bf16(CppContract):
    isa = "avx512bf16"


class TestAmx(CppContract):
    isa = "amx"


@pytest.mark.skipif(NO_CPP is not None, reason=str(NO_CPP))
class TestCpp:
    device = CPU

    def select(self, case):
        return chosen(case, "cpp")

    def test_threads_do_not_change_a_decode(self):
        scene = Scene(KernelCase((1,) * 3, (40, 700, 1300), dtype=torch.bfloat16), self.device)
        kernels = self.select(scene.case)
        before = torch.get_num_threads()
        answers = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                answers.append(scene.attend(kernels, scene.batch, scene.query))
        finally:
            torch.set_num_threads(before)
        assert same_bytes(answers[0], answers[1])
        assert same_bytes(answers[0], answers[2])

    @pytest.mark.parametrize("window", [None, 100])
    def test_where_a_prompt_is_cut_does_not_change_it(self, window):
        """All at once, or its last tokens as a chunk over what is cached: the same bits."""
        whole = KernelCase((700,), (700,), dtype=torch.bfloat16, window=window)
        scene = Scene(whole, CPU)
        kernels = self.select(whole)
        at_once = scene.attend(kernels, scene.batch, scene.query)
        for cached in (1, 16, 333, 512, 690):
            batch = AttentionBatch.build([700 - cached], [700], scene.tables, whole.block_size)
            chunk = scene.attend(kernels, batch, scene.query[cached:])
            assert same_bytes(chunk, at_once[cached:]), cached

    @pytest.mark.parametrize("wrong", [-1, 10_000])
    def test_a_block_outside_the_pool_is_refused(self, wrong):
        scene = Scene(KernelCase((1, 1), (40, 50)), self.device)
        scene.tables[1][2] = wrong
        with pytest.raises(IndexError, match=f"block_tables has {wrong}"):
            scene.attend(self.select(scene.case), scene.batch, scene.query)

    def test_table_entries_past_the_context_are_never_read(self):
        scene = Scene(KernelCase((1, 1), (40, 50)), self.device)
        wanted = scene.attend(self.select(scene.case), scene.batch, scene.query)
        scene.tables[0].append(10_000)
        batch = scene.batch_of([0, 1])
        assert same_bytes(scene.attend(self.select(scene.case), batch, scene.query), wanted)

    def test_every_fp16_value_is_read_as_torch_reads_it(self):
        # One token a context: attention returns its V, whatever the score.
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = values.view(torch.float16).reshape(64, 4, 256)
        case = KernelCase(
            (1,) * 64, (1,) * 64, 4, 1, key_dim=16, value_dim=256, dtype=torch.float16
        )
        scene = Scene(case, self.device)
        kernels = self.select(case)
        for sequence in range(64):
            kernels.write_kv(
                scene.pool,
                case.layout,
                LAYER,
                scene.keys[sequence],
                values[sequence : sequence + 1],
                scene.slots(sequence),
            )
        out = scene.attend(kernels, scene.batch, scene.query.float())
        # The one weight is 1 up to the last places of fp32, far finer than any fp16.
        torch.testing.assert_close(out, values.float(), rtol=3e-7, atol=0, equal_nan=True)


def dense(scene, r, rows, mask):
    """Attention of one sequence as it is written on paper; and the log-sum-exp."""
    case = scene.case
    query = scene.query[rows].float().transpose(0, 1)
    key = scene.keys[r].float().repeat_interleave(case.group, 1).transpose(0, 1)
    value = scene.values[r].float().repeat_interleave(case.group, 1).transpose(0, 1)
    scores = query @ key.transpose(1, 2) * case.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if case.sinks:
        column = scene.options.sinks[:, None, None].expand(-1, len(query[0]), 1)
        scores = torch.cat([scores, column], -1)
        value = torch.cat([value, torch.zeros_like(value[:, :1])], 1)
    elif case.softcap is None:
        torch.testing.assert_close(
            scores.softmax(-1) @ value,
            scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=case.scale),
            rtol=1e-5,
            atol=1e-5,
        )
    return (scores.softmax(-1) @ value).transpose(0, 1), scores.logsumexp(-1).T


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_dense_attention(name):
    """K and V never saw a pool here; mask, softmax and heads are torch's own."""
    scene = Scene(CASES[name], CPU)
    case = scene.case
    out, lse = scene.expected()
    start = 0
    for r, (queries, context) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        rows = slice(start, start + queries)
        start += queries
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        if case.window is not None:
            mask = mask.triu(context - queries - case.window + 1)
        wanted, wanted_lse = dense(scene, r, rows, mask)
        torch.testing.assert_close(out[rows], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[rows], wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HOLES)
def test_the_reference_leaves_holes_out(name):
    scene = Scene(HOLES[name], CPU)
    case = scene.case
    batch, held = scene.with_holes()
    out, lse = scene.expected(batch)
    start = 0
    for r, (queries, context) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        rows = slice(start, start + queries)
        start += queries
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        wanted, wanted_lse = dense(scene, r, rows, mask & held[r])
        torch.testing.assert_close(out[rows], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[rows], wanted_lse, rtol=1e-5, atol=1e-5)


def test_the_reference_bounds_its_tiles(monkeypatch):
    """More tiles than queries need be: the result may not show where one ends."""
    scene = Scene(KernelCase((70,), (100,)), CPU)
    whole, whole_lse = scene.expected()
    monkeypatch.setattr("kvist.kernels.reference._TILE_BYTES", 4 * 3 * 100 * 7)
    out, lse = scene.expected()
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value_dim", [64, 32])
def test_bounded_chunks_do_not_show(monkeypatch, value_dim):
    """The torch kernels with room for one piece, or a few queries, at a time."""
    case = KernelCase((1, 1, 1, 30), (700, 20, 600, 90), value_dim=value_dim)
    scene = Scene(case, CPU)
    kernels = chosen(case, "torch")
    whole = scene.attend(kernels, scene.batch, scene.query)
    monkeypatch.setattr("kvist.kernels.paged._CHUNK_BYTES", 1)
    monkeypatch.setattr("kvist.kernels.paged._SCORE_BYTES", 4 * 6 * 90 * 4)
    monkeypatch.setattr("kvist.kernels.paged._QUERY_TILE", 7)
    tiled = scene.attend(kernels, scene.batch, scene.query)
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-6)
